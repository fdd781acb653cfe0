"""A Ray cluster: how it is reached, and whether its nodes are ready for jobs.

Everything that can be wrong with a cluster is asked of every node before any job starts.
"""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from polymask.benchmarks.jobs import Job
from polymask.benchmarks.ray_tasks import Meeting, count_images, look_around, versions
from polymask.errors import EngineError

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
