"""Jobs on a Ray cluster: the driver's side. One task a job, done again where a worker or a node dies.

Every node is checked before any job starts. A job keeps its checkpoints in a folder that all nodes share, so a task
that is done again goes on where the last one was cut. The base is one read-only file that every node maps into memory.
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

from polymask.benchmarks import nodes
from polymask.benchmarks.jobs import BaseName, Job
from polymask.benchmarks.local import Tally, sigterm_as_ctrl_c
from polymask.benchmarks.records import RESULT
from polymask.core.network import digest_tensors
from polymask.errors import EngineError, InterruptedTraining
from polymask.files import SUFFIX
from polymask.nets.base_file import read_metadata, read_state, write_aligned
from polymask.nets.zoo import build

RAY_SETTINGS = {  # of its environment, where nobody has set them
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_NUM_REDIS_GET_RETRIES": "2",  # to connect: its 20 take a quarter of an hour
    "RAY_raylet_start_wait_time_s": "120",  # for a node on a busy machine to start
}
_ANSWER = 300.0  # seconds that a node has to answer
_RETRIES = 10  # deaths of a worker or a node that one job survives
_SAVING = 60.0  # seconds that jobs have to save when the driver is asked to stop


@dataclass(frozen=True)
class RayOptions:
    """What a job gets of a node, and where the cluster is; see `run_jobs`."""

    cpus: float = 1
    gpus: float = 0
    address: str | None = None
    threads: int = 1
    shared: str | None = None

    def __post_init__(self) -> None:
        if self.cpus <= 0 or self.gpus < 0:
            raise EngineError(
                f"cpus_per_job={self.cpus} and gpus_per_job={self.gpus}; give more than 0 CPUs, and 0 GPUs or more"
            )


def run_on_ray(tally: Tally, options: RayOptions) -> None:
    """Do the jobs that wait; see `run_jobs`."""
    if not tally.waiting:
        return
    with connected(options.address) as ray, sigterm_as_ctrl_c():
        _Run(ray, tally, options).run()


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
            f"no Ray cluster {where} ({last_line(error)}); start one with `ray start --head`, or leave out --address "
            "for one of its own; a cluster with a token needs RAY_AUTH_MODE=token and its ~/.ray/auth_token here"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()  # never `ray stop`, which ends the Ray of everybody on this machine


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
            f"no Ray cluster at {address} ({error}); start one there with `ray start --head --port {port}`, or leave "
            "out --address for one of its own"
        ) from error


def check_nodes(ray: Any, options: RayOptions, driver: nodes.DriverInfo, jobs: Sequence[Job]) -> None:
    """Raise unless every node that a job can come to is ready for it."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    able = {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in alive
        if node["Resources"].get("CPU", 0.0) >= options.cpus and node["Resources"].get("GPU", 0.0) >= options.gpus
    }
    if not able:
        raise EngineError(
            f"none of the cluster's {len(alive)} nodes has {options.cpus:g} CPUs and {options.gpus:g} GPUs, as a job "
            "needs; ask for fewer"
        )
    check = ray.remote(nodes.check_node)
    answers = {}
    for name, address in able.items():
        on_it = check.options(num_cpus=0, max_retries=0, scheduling_strategy=_on_node(name))
        answers[on_it.remote(driver, jobs)] = address
    here = nodes.count_images(jobs)  # while the nodes count theirs
    _, silent = ray.wait(list(answers), num_returns=len(answers), timeout=_ANSWER)
    if silent:
        raise EngineError(
            f"node {answers[silent[0]]} has not answered for {_ANSWER:.0f} s; check it, or take it out of the cluster"
        )
    for answer, address in answers.items():
        check_answer(ray, answer, address, here)


def check_answer(ray: Any, answer: Any, address: str, here: Mapping[str, str]) -> None:
    """Raise unless a node is well and sees the images that are here."""
    try:
        trouble, images = ray.get(answer)
    except ray.exceptions.RayError as error:
        raise EngineError(
            f"node {address} cannot run jobs ({last_line(error)}); install there {nodes.versions()}"
        ) from error
    if trouble is not None:
        raise EngineError(f"node {address}: {trouble}")
    for domain, there in images.items():
        if there != here[domain]:
            raise EngineError(
                f"node {address} has other images of {domain} than the driver: {there}; here: {here[domain]}. Put the "
                "same on all nodes"
            )


def last_line(error: Exception) -> str:
    """The line of a Ray error that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


def _on_node(node: str) -> Any:
    """What tells Ray to run a task on this node and on no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


class _Run:
    """One call of `run_on_ray`."""

    def __init__(self, ray: Any, tally: Tally, options: RayOptions) -> None:
        self.ray, self.tally, self.options = ray, tally, options
        jobs = {number: tally.jobs[number] for number in tally.waiting}
        self.jobs = {
            number: replace(job, folder=job.folder.absolute(), cache=job.cache and job.cache.absolute())
            for number, job in jobs.items()
        }
        # What all jobs have in common: the folder of their runs.
        self.root = Path(os.path.commonpath([job.folder.absolute().parent for job in tally.jobs]))
        self.shared = None if options.shared is None else nodes.SharedFolder(options.shared)
        names = {nodes.shared_name(job) for job in self.jobs.values()}
        if self.shared is not None and len(names) < len(self.jobs):
            raise EngineError(
                f"{len(self.jobs)} jobs have {len(names)} names in {self.shared.url}; let the last three parts of "
                "their folders differ"
            )

    def run(self) -> None:
        """Check the cluster, then do the jobs."""
        from ray.util.queue import Queue

        place = self.shared or nodes.SharedFolder(str(self.root))
        token = (f".token-{uuid.uuid4().hex}", uuid.uuid4().hex)
        place.write(token[0], token[1].encode())
        driver = nodes.DriverInfo(place.url, token, str(Path.cwd()), nodes.versions(), remote=self.shared is not None)
        # A queue beside the driver, where jobs tell how they go; its process starts while the nodes are asked.
        home = _on_node(self.ray.get_runtime_context().get_node_id())
        kept = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": home}
        board = Queue(actor_options=kept)
        try:
            check_nodes(self.ray, self.options, driver, list(self.jobs.values()))
            self.jobs = {n: job for n, job in self.jobs.items() if not self._collect_done(n)}
            self._work(driver, board)
        finally:
            board.shutdown(force=True)
            place.delete(token[0])

    def _work(self, driver: nodes.DriverInfo, board: Any) -> None:
        """Start a task for every job, and listen until all have ended."""
        task = self.ray.remote(
            num_cpus=self.options.cpus,
            num_gpus=self.options.gpus,
            max_retries=_RETRIES,
            retry_exceptions=[InterruptedTraining],  # its node was told to stop
        )(nodes.work)
        bases = {base: self._copied(base) for base in {job.base for job in self.jobs.values()}}
        running = {}
        for number, job in self.jobs.items():
            sent = replace(job, base=bases[job.base])
            named = task.options(name=job.title)  # `ps` and Ray's own tools show it
            running[named.remote(number, sent, driver, self.options.threads, board.actor)] = number
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
        from ray.util.queue import Empty

        try:
            told = list(board.get_nowait_batch(board.qsize()))  # nobody else takes from it
        except Empty:  # it has died in between, and was started again
            return
        except self.ray.exceptions.RayError as error:
            raise EngineError(
                f"the cluster has dropped the driver ({last_line(error)}); run the same again to go on. If that is at "
                "once, give driver and nodes the same RAY_AUTH_MODE"
            ) from error
        waiting = set(self.tally.waiting)
        for what, number, *details in told:
            if number in waiting:
                getattr(self.tally, what)(number, *details)

    def _copied(self, base: BaseName) -> BaseName:
        copy = copy_base(base, self.root)
        file = copy.file
        assert file is not None
        if self.shared is not None and self.shared.read(file.name) is None:
            self.shared.write(file.name, file.read_bytes())
        return copy

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
        if self.shared is not None and RESULT in self.shared.names(nodes.shared_name(job)):
            nodes.Mirror(self.shared, nodes.shared_name(job), job.folder).pull()
        outcome = job.outcome()
        if outcome is None:
            return False
        self.tally.finished(number, outcome)
        return True


def copy_base(base: BaseName, folder: Path) -> BaseName:
    """Write the base's tensors to `folder`, and say how to load it from there.

    What is loaded has the name, the input and the fingerprint of the original.
    """
    source = base.file
    if source is not None and source.suffix == SUFFIX:
        state, metadata = read_state(source), read_metadata(source)
    else:
        net, _ = build(base.name, weights=base.weights)
        state, metadata = dict(net.state_dict()), {}
    file = folder.absolute() / f"base-{digest_tensors(state)[:16]}{SUFFIX}"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_aligned(file, state, metadata)
        file.chmod(0o444)
    return base.at(file)
