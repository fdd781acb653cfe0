"""Jobs on a Ray cluster: whether its nodes are ready, then one task a job, done again where a worker or a node dies.

A Ray cluster: how it is reached, and whether its nodes are ready for jobs.

Everything that can be wrong with a cluster is asked of every node before any job starts.

Jobs on a Ray cluster: one task each, done again where a worker or a node dies.

A job keeps its checkpoints in a folder that all nodes share, so a task that is done again goes on
where the last one was cut.
"""

import os
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polymask.benchmarks.jobs import BaseName, Job
from polymask.benchmarks.local import Tally, sigterm_as_ctrl_c
from polymask.benchmarks.ray_tasks import Meeting, count_images, look_around, shared_name, versions, work
from polymask.benchmarks.records import RESULT
from polymask.benchmarks.shared_folder import Mirror, SharedFolder, copy_base
from polymask.errors import EngineError, InterruptedTraining

RAY_SETTINGS = {  # of its environment, where nobody has set them
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_NUM_REDIS_GET_RETRIES": "2",  # to connect: its 20 take a quarter of an hour
    "RAY_raylet_start_wait_time_s": "120",  # for a node on a busy machine to start
}
_ANSWER = 300.0  # seconds that a node has to look around


@dataclass(frozen=True)
class Share:
    """What a job takes of a node."""

    cpus: float = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        if self.cpus <= 0 or self.gpus < 0:
            raise EngineError(
                f"cpus_per_job={self.cpus} and gpus_per_job={self.gpus}; give more than 0 CPUs, and 0 GPUs or more"
            )

    def fits(self, resources: Mapping[str, float]) -> bool:
        """Whether a node of these resources has room for a job."""
        return resources.get("CPU", 0.0) >= self.cpus and resources.get("GPU", 0.0) >= self.gpus


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The module ray, with the cluster at an address, or one of our own that ends with us."""
    if address is not None:
        _check_address(address)
    ray = _import_ray()
    if ray.is_initialized():
        yield ray
        return
    quiet = {"log_to_driver": False, "logging_level": "error"}
    try:
        if address is None:
            # "local", since with none ray would take any cluster that it finds on this machine.
            ray.init("local", include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        else:
            ray.init(address, **quiet)
    except Exception as error:
        if type(error) not in (ConnectionError, RuntimeError, ValueError, TimeoutError, Exception):
            raise  # ray gives no class of their own to its errors of starting and connecting
        where = "on this machine" if address is None else f"at {address}"
        raise EngineError(
            f"no Ray cluster {where} ({last_line(error)}); start one with `ray start --head`, or "
            "leave out --address for one of its own; a cluster that asks for a token needs "
            "RAY_AUTH_MODE=token and its ~/.ray/auth_token here"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()  # never `ray stop`, which ends the Ray of everybody on this machine


def check_nodes(ray: Any, share: Share, meeting: Meeting, jobs: Sequence[Job]) -> None:
    """Raise unless every node that a job can come to is ready for it."""
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    able = {name: node for name, node in nodes.items() if share.fits(node["Resources"])}
    if not able:
        raise EngineError(
            f"none of the cluster's {len(nodes)} nodes has {share.cpus:g} CPUs and "
            f"{share.gpus:g} GPUs, as a job needs; ask for fewer"
        )
    look = ray.remote(look_around)
    answers = {
        look.options(num_cpus=0, max_retries=0, scheduling_strategy=on_node(name)).remote(meeting, jobs): node[
            "NodeManagerAddress"
        ]
        for name, node in able.items()
    }
    here = count_images(jobs)  # while they look
    _, silent = ray.wait(list(answers), num_returns=len(answers), timeout=_ANSWER)
    if silent:
        raise EngineError(
            f"node {answers[silent[0]]} has not answered for {_ANSWER:.0f} s; see whether it is "
            "well, or take it out of the cluster"
        )
    for answer, address in answers.items():
        check_answer(ray, answer, address, here)


def check_answer(ray: Any, answer: Any, address: str, here: Mapping[str, str]) -> None:
    """Raise unless a node is well and sees the images that are here."""
    try:
        why, images = ray.get(answer)
    except ray.exceptions.RayError as error:
        raise EngineError(f"node {address} cannot run jobs ({last_line(error)}); install there {versions()}") from error
    if why is not None:
        raise EngineError(f"node {address}: {why}")
    for domain, there in images.items():
        if there != here[domain]:
            raise EngineError(
                f"node {address} has other images of {domain} than the driver: {there}; here: "
                f"{here[domain]}. Put the same on all nodes"
            )


def start_board(ray: Any) -> Any:
    """A queue beside the driver, where jobs tell how they go."""
    from ray.util.queue import Queue

    kept = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    home = on_node(ray.get_runtime_context().get_node_id())
    return Queue(actor_options=kept | {"scheduling_strategy": home})


def read_board(board: Any) -> list[tuple[Any, ...]]:
    """What jobs have told since the last time."""
    from ray.util.queue import Empty

    try:
        return list(board.get_nowait_batch(board.qsize()))  # nobody else takes from it
    except Empty:  # it has died in between, and begun anew
        return []


def on_node(node: str) -> Any:
    """What tells Ray to run a task on this node and on no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def last_line(error: Exception) -> str:
    """What an error of Ray's comes down to."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


def _import_ray() -> Any:
    if find_spec("ray") is None:
        raise EngineError("ray is not installed; pip install 'polymask[ray]'")
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    return ray


def _check_address(address: str) -> None:
    """Raise unless something listens there; ray itself would try for minutes."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise EngineError(f"--address {address}: give auto, or HOST:PORT of the head node")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise EngineError(
            f"no Ray cluster at {address} ({error}); start one there with `ray start --head "
            f"--port {port}`, or leave out --address for one of its own"
        ) from error


_RETRIES = 10  # deaths of a worker or a node that one job survives
_SAVING = 60.0  # seconds that jobs have to save when the driver is asked to stop


@dataclass(frozen=True)
class RayOptions:
    """Where the cluster is, and what a job gets of it; see `run_jobs`."""

    share: Share
    address: str | None = None
    threads: int | None = None
    shared: str | None = None


def run_on_ray(tally: Tally, options: RayOptions) -> None:
    """Do the jobs that wait; see `run_jobs`."""
    if not tally.waiting:
        return
    with connected(options.address) as ray, sigterm_as_ctrl_c():
        _Run(ray, tally, options).run()


class _Run:
    """One call of `run_on_ray`."""

    def __init__(self, ray: Any, tally: Tally, options: RayOptions) -> None:
        self.ray, self.tally, self.options = ray, tally, options
        self.jobs = {number: _absolute(tally.jobs[number]) for number in tally.waiting}
        # What all jobs have in common: the folder of their runs.
        self.root = Path(os.path.commonpath([job.folder.absolute().parent for job in tally.jobs]))
        self.shared = None if options.shared is None else SharedFolder(options.shared)
        names = {shared_name(job) for job in self.jobs.values()}
        if self.shared is not None and len(names) < len(self.jobs):
            raise EngineError(
                f"{len(self.jobs)} jobs have {len(names)} names in {self.shared.url}; let the last "
                "three parts of their folders differ"
            )

    def run(self) -> None:
        """Check the cluster, then do the jobs."""
        meeting = self._meet()
        board = start_board(self.ray)  # a process, which starts while the nodes are asked
        try:
            check_nodes(self.ray, self.options.share, meeting, list(self.jobs.values()))
            self.jobs = {n: job for n, job in self.jobs.items() if not self._collect_done(n)}
            self._work(meeting, board)
        finally:
            board.shutdown(force=True)
            self._part(meeting)

    def _meet(self) -> Meeting:
        token = (f".token-{uuid.uuid4().hex}", uuid.uuid4().hex)
        if self.shared is None:
            self.root.mkdir(parents=True, exist_ok=True)
            (self.root / token[0]).write_text(token[1])
        else:
            self.shared.write(token[0], token[1].encode())
        root = str(self.root) if self.shared is None else self.shared.url
        return Meeting(root, token, str(Path.cwd()), versions(), self.shared is not None)

    def _part(self, meeting: Meeting) -> None:
        if self.shared is None:
            (self.root / meeting.token[0]).unlink(missing_ok=True)
        else:
            self.shared.delete(meeting.token[0])

    def _work(self, meeting: Meeting, board: Any) -> None:
        """Start a task for every job, and listen until all have ended."""
        task = self.ray.remote(work)
        options = {
            "num_cpus": self.options.share.cpus,
            "num_gpus": self.options.share.gpus,
            "max_retries": _RETRIES,
            "retry_exceptions": [InterruptedTraining],  # its node was told to stop
        }
        threads = self.options.threads or max(1, int(self.options.share.cpus))
        bases = self._copied_bases()
        running = {}
        for number, job in self.jobs.items():
            sent = replace(job, base=bases[job.base])
            named = task.options(name=job.title, **options)  # `ps` and Ray's own tools show it
            running[named.remote(number, sent, meeting, threads, board.actor)] = number
        try:
            while running:
                ready, _ = self.ray.wait(list(running), timeout=0.5)
                self._hear(board)
                for answer in ready:
                    self._close(answer, running.pop(answer))
        finally:
            for answer in running:  # only where something stops the driver
                self.ray.cancel(answer)
            if running:
                self.ray.wait(list(running), num_returns=len(running), timeout=_SAVING)

    def _hear(self, board: Any) -> None:
        """Pass on what jobs have told; a message may come after its job has ended."""
        try:
            told = read_board(board)
        except self.ray.exceptions.RayError as error:
            raise EngineError(
                f"the cluster has dropped the driver ({last_line(error)}); run the same again to "
                "go on. If that is at once, give driver and nodes the same RAY_AUTH_MODE"
            ) from error
        waiting = set(self.tally.waiting)
        for what, number, *details in told:
            if number in waiting:
                getattr(self.tally, what)(number, *details)

    def _copied_bases(self) -> dict[BaseName, BaseName]:
        bases = {base: copy_base(base, self.root) for base in {j.base for j in self.jobs.values()}}
        if self.shared is not None:
            for copy in bases.values():
                file = Path(copy.name) if copy.weights is None else copy.weights
                if self.shared.read(file.name) is None:
                    self.shared.write(file.name, file.read_bytes())
        return bases

    def _close(self, answer: Any, number: int) -> None:
        try:
            how, why = self.ray.get(answer)
        except self.ray.exceptions.RayError as error:
            how, why = "failed", f"{last_line(error)}; run again to go on with it"
        if how == "failed":
            self.tally.failed(number, str(why))
        elif not self._collect_done(number):
            self.tally.failed(number, f"its result is not in {self.jobs[number].folder}")

    def _collect_done(self, number: int) -> bool:
        """Take note of a job that is done; its files come here where they are elsewhere."""
        job = self.jobs[number]
        if self.shared is not None and RESULT in self.shared.names(shared_name(job)):
            Mirror(self.shared, shared_name(job), job.folder).pull()
        outcome = job.outcome()
        if outcome is None:
            return False
        self.tally.finished(number, outcome)
        return True


def _absolute(job: Job) -> Job:
    return replace(
        job,
        folder=job.folder.absolute(),
        cache=None if job.cache is None else job.cache.absolute(),
    )
