"""Jobs on this machine: in this process one by one, or in several processes."""

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from polymask.benchmarks.job_progress import JobProgress
from polymask.benchmarks.jobs import run_job
from polymask.benchmarks.stopping import sigterm_as_ctrl_c
from polymask.benchmarks.tally import Tally
from polymask.errors import EngineError, InterruptedTraining, PolymaskError


def run_locally(tally: Tally, *, workers: int = 1, threads: int | None = None) -> None:
    """Do the jobs that wait.

    With `workers` above 1 each has `threads` threads (its share of the cores, unless given).
    """
    if workers < 1:
        raise EngineError(f"workers={workers}; give one or more")
    if workers == 1:
        _in_process(tally, threads)
        return
    share = threads or max(1, torch.get_num_threads() // workers)
    _in_processes(tally, min(workers, len(tally.waiting)), share)


def _in_process(tally: Tally, threads: int | None) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        for number in tally.waiting:
            tally.started(number)
            try:
                outcome = run_job(tally.jobs[number], JobProgress(partial(tally.progressed, number)))
            except InterruptedTraining:
                raise
            except PolymaskError as error:
                tally.failed(number, str(error))
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
        except PolymaskError as error:
            events.put(("failed", number, str(error)))


def _end_with_parent() -> None:
    """Save and end where the parent was killed, and could not ask for it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
