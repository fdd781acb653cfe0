"""Where jobs run: one by one in this process, in several processes, or on a Ray cluster; and who is told of them."""

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch

from polymask.benchmarks.jobs import Job, run_job
from polymask.benchmarks.records import Outcome
from polymask.errors import BenchmarkError, EngineError, InterruptedTraining, PolymaskError
from polymask.train.fit import Listener
from polymask.train.recipe import Recipe


class Watcher:
    """Told of every job, in the process that asked for them; does nothing unless overridden."""

    def started(self, job: Job) -> None:
        """A job begins, or goes on where it was cut."""

    def progressed(self, job: Job, share: float, note: str) -> None:
        """So much of a job's epochs is done (of its current domain and stage), 0 … 1."""

    def finished(self, job: Job, outcome: Outcome) -> None:
        """A job is done, now or before."""

    def failed(self, job: Job, error: str) -> None:
        """A job cannot be done; the others go on."""


class Tally:
    """Jobs by number: which wait, what was found, which failed. Passes everything on to the watcher."""

    def __init__(self, jobs: Sequence[Job], watcher: Watcher | None = None) -> None:
        self.jobs, self.watcher = jobs, watcher or Watcher()
        self.outcomes: dict[int, Outcome] = {}
        self.failures: dict[int, str] = {}
        for number, job in enumerate(jobs):
            done = job.outcome()
            if done is not None:
                self.finished(number, done)

    @property
    def waiting(self) -> list[int]:
        """The jobs that are neither done nor failed."""
        closed = self.outcomes.keys() | self.failures.keys()
        return [number for number in range(len(self.jobs)) if number not in closed]

    def started(self, number: int) -> None:
        self.watcher.started(self.jobs[number])

    def progressed(self, number: int, share: float, note: str) -> None:
        self.watcher.progressed(self.jobs[number], share, note)

    def finished(self, number: int, outcome: Outcome) -> None:
        self.outcomes[number] = outcome
        self.watcher.finished(self.jobs[number], outcome)

    def failed(self, number: int, why: str) -> None:
        self.failures[number] = why
        self.watcher.failed(self.jobs[number], why)

    def result(self) -> list[Outcome]:
        """What all jobs found, in order; all failures as one error."""
        if self.failures:
            listed = "; ".join(f"{self.jobs[n].title}: {why}" for n, why in self.failures.items())
            raise BenchmarkError(f"{len(self.failures)} of {len(self.jobs)} jobs failed: {listed}")
        return [self.outcomes[number] for number in range(len(self.jobs))]


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Within it, SIGTERM raises KeyboardInterrupt in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class JobProgress(Listener):
    """Tells after every step how much is done, 0 … 1, and a note for a person."""

    def __init__(self, tell: Callable[[float, str], None]) -> None:
        self.tell = tell

    def begin(self, recipe: Recipe, steps: int, epoch: int) -> None:
        self.total = max(1, recipe.epochs * steps)
        self.steps = steps

    def step(self, epoch: int, step: int, loss: float, images: int, density: float | None) -> None:
        share = (epoch * self.steps + step) / self.total
        self.tell(share, f"epoch {epoch + 1} · loss {loss:.3f}")


FAILURES = (PolymaskError, RuntimeError, OSError, MemoryError)  # of a job: torch's own and full disks among them


def failure(error: BaseException) -> str:
    """What is said of a job that failed."""
    return str(error) if isinstance(error, PolymaskError) else f"{type(error).__name__}: {error}"


def _in_process(tally: Tally, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for number in tally.waiting:
            tally.started(number)
            try:
                outcome = run_job(tally.jobs[number], JobProgress(partial(tally.progressed, number)))
            except InterruptedTraining:
                raise
            except FAILURES as error:
                tally.failed(number, failure(error))
            else:
                tally.finished(number, outcome)
    finally:
        torch.set_num_threads(before)


def _in_processes(tally: Tally, workers: int, threads: int) -> None:
    """Let processes take jobs from a queue and tell how they go; ends all of them in any case."""
    context = multiprocessing.get_context("spawn")
    todo, events = context.Queue(), context.Queue()
    for number in tally.waiting:
        todo.put((number, tally.jobs[number]))
    for _ in range(workers):
        todo.put(None)
    processes = [context.Process(target=_work, args=(todo, events, threads), daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    try:
        with sigterm_as_ctrl_c():
            _listen(tally, events, processes)
    finally:
        todo.cancel_join_thread()  # jobs that nobody takes any more must not keep us
        for process in processes:
            process.terminate()  # a worker in training saves first
        for process in processes:
            process.join()


def _listen(tally: Tally, events: Any, processes: Sequence[Any]) -> None:
    while tally.waiting:
        try:
            what, number, *details = events.get(timeout=1.0)
        except queue.Empty:
            if not any(process.is_alive() for process in processes):
                for number in tally.waiting:
                    tally.failed(number, "its process died; run again to go on with it")
            continue
        getattr(tally, what)(number, *details)


def _work(todo: Any, events: Any, threads: int) -> None:
    """What a process of the pool does: jobs until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of Ctrl-C, and ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    while (item := todo.get()) is not None:
        number, job = item
        events.put(("started", number))

        def tell(share: float, note: str, number: int = number) -> None:
            events.put(("progressed", number, share, note))

        try:
            events.put(("finished", number, run_job(job, JobProgress(tell))))
        except InterruptedTraining:
            events.cancel_join_thread()  # nobody may be there to read what is still in it
            return
        except FAILURES as error:
            events.put(("failed", number, failure(error)))


def _end_with_parent() -> None:
    """Save and end where the parent was killed, and could not ask for it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


Engine = Literal["local", "ray"]


def run_jobs(
    jobs: Sequence[Job],
    *,
    engine: Engine = "local",
    workers: int = 1,
    threads: int | None = None,
    watcher: Watcher | None = None,
    address: str | None = None,
    cpus_per_job: float = 1,
    gpus_per_job: float = 0,
    shared: str | None = None,
) -> list[Outcome]:
    """Do all jobs; those that are done are only read. Gives what was found, in order.

    A job that fails does not stop the others; in the end the failures are one error. Ctrl-C and
    SIGTERM let the jobs that run save, and raise `InterruptedTraining`. Results do not depend on
    the engine, only on `threads`, those of each job.

    "local" runs jobs in this process, or in `workers` processes. "ray" runs them on the Ray cluster at `address`
    ("auto", or HOST:PORT; None starts one of its own on this machine), each with `cpus_per_job` and `gpus_per_job`, and
    again where a worker or a node dies. There the jobs' folders must be on a file system that all nodes share, or
    `shared` must be the URL of a folder that they share, of any kind that fsspec knows.
    """
    if engine not in get_args(Engine):
        raise EngineError(f"engine {engine!r} is not one of {', '.join(get_args(Engine))}")
    each = threads_of_a_job(engine, workers, threads, cpus_per_job)
    tally = Tally(jobs, watcher)
    try:
        if engine == "ray":
            from polymask.benchmarks.ray import RayOptions, run_on_ray

            run_on_ray(tally, RayOptions(cpus_per_job, gpus_per_job, address, each, shared))
        elif workers < 1:
            raise EngineError(f"workers={workers}; give one or more")
        elif workers == 1:
            _in_process(tally, each)
        else:
            _in_processes(tally, min(workers, len(tally.waiting)), each)
    except (KeyboardInterrupt, InterruptedTraining) as stopped:
        raise InterruptedTraining(
            f"stopped with {len(tally.outcomes)} of {len(jobs)} jobs done; those that ran have "
            "saved: run the same again to go on"
        ) from stopped
    return tally.result()


def threads_of_a_job(engine: Engine, workers: int, threads: int | None, cpus_per_job: float = 1) -> int:
    """How many threads each job runs with: those asked for, or its share of the cores."""
    share = int(cpus_per_job) if engine == "ray" else torch.get_num_threads() // max(1, workers)
    return max(1, share) if threads is None else threads
