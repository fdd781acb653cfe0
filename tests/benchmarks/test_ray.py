"""Jobs on a real Ray cluster of two nodes, on this machine."""

import json
import os
import signal
import socket
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import polymask as pm
from image_folders import make_folder
from polymask.benchmarks.jobs import BaseName
from polymask.benchmarks.local import Watcher, run_jobs
from polymask.benchmarks.planning import Request, final_jobs, make_plan
from polymask.benchmarks.ray import RAY_SETTINGS
from polymask.benchmarks.suites import Protocol, find_suite
from polymask.train.recipe import get_recipe

for name, value in (RAY_SETTINGS | {"RAY_raylet_start_wait_time_s": "40"}).items():
    os.environ.setdefault(name, value)
ray = pytest.importorskip("ray", reason="needs the extra ray")
psutil = pytest.importorskip("psutil", reason="needs the extra ray")

pytestmark = [
    pytest.mark.slow,
    # Ray's own: its processes outlive the objects that started them.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def make_jobs(root: Path, out: str, methods=("affine-full", "bn-only"), epochs=6):
    for number, name in enumerate(("apples", "pears", "plums")):
        if not (root / "domains" / name).exists():
            make_folder(root / "domains" / name, train=8 + number)
    recipe = get_recipe("quick", side=32, epochs=epochs, batch_size=4)
    suite = find_suite(str(root / "domains"), None)
    base = BaseName("efficientnet-lite0")
    request = Request(suite, base, methods, (0,), Protocol(recipe), root / out)
    return final_jobs(request, make_plan(request))


def files_of(jobs):
    """What jobs leave behind, but for how long they took."""
    found = {}
    for job in jobs:
        result = json.loads((job.folder / "result.json").read_text())
        assert result.pop("seconds") > 0
        name = "/".join(job.folder.parts[-3:])
        found[name] = json.dumps(result)
        for pack in (job.folder / "packs").iterdir():
            found[f"{name}/{pack.name}"] = pack.read_bytes()
    return found


def node_settings():
    """One CPU, and ports known beforehand: a node does not wait for them on a busy machine."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(4)]
        for probe in probes:
            probe.bind(("", 0))
        ports = [probe.getsockname()[1] for probe in probes]
    names = ("metrics_agent_port", "metrics_export_port")
    names += ("runtime_env_agent_port", "dashboard_agent_listen_port")
    return {"num_cpus": 1, **dict(zip(names, ports, strict=True))}


def started(start):
    """What `start` gives; Ray gives up after 15 s where a machine is busy, so it may try again."""
    for tries_left in (3, 2, 1, 0):
        try:
            return start()
        except Exception as error:
            if not tries_left or "timed out during startup" not in str(error):
                raise
    raise AssertionError


class Cluster:
    """Two nodes of one CPU each, and the processes that make them up."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as Nodes

        self.nodes = started(
            lambda: Nodes(initialize_head=True, head_node_args=node_settings() | {"include_dashboard": False})
        )
        # One has a GPU: Ray takes our word for it.
        self.second = started(lambda: self.nodes.add_node(**node_settings(), num_gpus=1))
        self.nodes.wait_for_nodes()
        self.address = self.nodes.address
        self.pids: set[int] = set()
        self.note()

    def note(self) -> None:
        """Remember all processes that are there now."""
        for node in self.nodes.list_all_nodes():
            for kind in node.all_processes.values():
                for started in kind:
                    self.pids.add(started.process.pid)
                    children = psutil.Process(started.process.pid).children(recursive=True)
                    self.pids |= {child.pid for child in children}

    def worker(self, node, job) -> int | None:
        """The process that does a job, if it is on this node."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in raylet.children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if f"ray::{job.title}" in " ".join(process.cmdline()):
                    return process.pid
        return None

    def stop(self) -> None:
        """End it, and wait until no process of it is left."""
        self.note()
        self.nodes.shutdown()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.left():
            time.sleep(0.2)

    def left(self) -> list[int]:
        """Its processes that still run."""
        return [
            pid for pid in self.pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        ]


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.stop()
    assert cluster.left() == []


class Disaster(Watcher):
    """Kills a worker of the first node, then the second node, each in the middle of a job."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.starts = cluster, Counter()
        self.killed = self.lost = None  # the job that was cut
        self.maps = ""  # what the worker had in memory

    def started(self, job):
        self.starts[job.title] += 1

    def progressed(self, job, share, note):
        if not 0.2 < share < 0.7:
            return
        nodes = self.cluster.nodes
        if self.killed is None:
            pid = self.cluster.worker(nodes.head_node, job)
            if pid is not None:
                self.cluster.note()
                self.maps = Path(f"/proc/{pid}/maps").read_text()
                os.kill(pid, signal.SIGKILL)
                self.killed = job
        elif self.lost is None and self.cluster.worker(self.cluster.second, job) is not None:
            self.cluster.note()
            nodes.remove_node(self.cluster.second, allow_graceful=False)
            self.lost = job


def test_jobs_survive_a_killed_worker_and_a_lost_node_to_the_same_bytes(tmp_path):
    local = make_jobs(tmp_path, "local")
    assert len(local) == 6
    run_jobs(local, threads=1)
    jobs = make_jobs(tmp_path, "ray")
    cluster = Cluster()
    try:
        disaster = Disaster(cluster)
        found = run_jobs(jobs, engine="ray", address=cluster.address, threads=1, watcher=disaster)
    finally:
        cluster.stop()
    assert cluster.left() == []
    assert len(found) == 6
    assert files_of(jobs) == files_of(local)
    for cut in (disaster.killed, disaster.lost):
        assert disaster.starts[cut.title] > 1
        lines = map(json.loads, (cut.folder / "log.jsonl").read_text().splitlines())
        begins = [line["epoch"] for line in lines if line["event"] == "begin"]
        assert begins[-1] > 0  # it went on where it was cut
    (base,) = (tmp_path / "ray").glob("base-*.safetensors")
    assert str(base) in disaster.maps
    assert not list((tmp_path / "ray").rglob(".*"))


def test_jobs_that_need_a_gpu_go_where_one_is(cluster, tmp_path):
    jobs = make_jobs(tmp_path, "ray", ("classifier-only",), epochs=2)[:2]
    places = set()

    class Looks(Watcher):
        def progressed(self, job, share, note):
            for node in (cluster.nodes.head_node, cluster.second):
                if cluster.worker(node, job) is not None:
                    places.add(node)

    options = {"engine": "ray", "address": cluster.address, "watcher": Looks()}
    run_jobs(jobs, **options, cpus_per_job=0.5, gpus_per_job=0.5)
    assert places == {cluster.second}


def test_nodes_without_a_common_file_system_share_a_url(cluster, tmp_path):
    local = make_jobs(tmp_path, "local", ("classifier-only",), epochs=2)[:2]
    run_jobs(local, threads=1)
    jobs = make_jobs(tmp_path, "ray", ("classifier-only",), epochs=2)[:2]
    url = f"file://{tmp_path / 'bucket'}"
    options = {"engine": "ray", "address": cluster.address, "threads": 1}
    with pytest.raises(pm.EngineError, match="does not see what the driver wrote"):
        run_jobs(jobs, **options, shared="memory://runs")
    run_jobs(jobs, **options, shared=url)
    assert files_of(jobs) == files_of(local)
    # Another driver, with nothing on its own disk, finds them done.
    elsewhere = make_jobs(tmp_path, "elsewhere", ("classifier-only",), epochs=2)[:2]
    heard = []

    class Hears(Watcher):
        def started(self, job):
            heard.append(job)

    run_jobs(elsewhere, **options, shared=url, watcher=Hears())
    assert files_of(elsewhere) == files_of(local)
    assert heard == []


def test_a_cluster_without_room_for_a_job_is_told_before_any_training(cluster, tmp_path):
    jobs = make_jobs(tmp_path, "ray", ("classifier-only",))
    with pytest.raises(pm.EngineError, match="none of the cluster's 2 nodes has 64 CPUs"):
        run_jobs(jobs, engine="ray", address=cluster.address, cpus_per_job=64)
    assert not any(job.folder.exists() for job in jobs)


def test_a_job_that_fails_on_a_node_is_named_and_the_others_are_done(cluster, tmp_path):
    jobs = make_jobs(tmp_path, "ray", ("classifier-only", "affine-full"), epochs=1)[:2]
    (jobs[0].folder / "packs" / "learned").mkdir(parents=True)
    (jobs[0].folder / "packs" / "learned" / "apples.checkpoint").write_bytes(b"damaged")
    with pytest.raises(pm.BenchmarkError, match=r"1 of 2 jobs failed: .*apples.* not an intact"):
        run_jobs(jobs, engine="ray", address=cluster.address, threads=1)
    assert jobs[1].outcome() is not None
