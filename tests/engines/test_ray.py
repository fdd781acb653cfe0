"""Jobs on a real Ray cluster of two nodes, on this machine."""

import json
import os
import signal
import socket
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

import polymask as pm
from image_folders import make_folder
from polymask.benchmarks.jobs import BaseName
from polymask.benchmarks.planning import Request, make_plan
from polymask.benchmarks.protocol import Protocol
from polymask.benchmarks.suites import find_suite
from polymask.engines import Watcher, run_jobs
from polymask.engines.ray_engine import RAY_SETTINGS
from polymask.recipes import get_recipe

for name, value in RAY_SETTINGS.items():
    os.environ.setdefault(name, value)
ray = pytest.importorskip("ray", reason="needs the extra ray")
psutil = pytest.importorskip("psutil", reason="needs the extra ray")

pytestmark = [
    pytest.mark.slow,
    # Ray's own: its processes outlive the objects that started them.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def make_jobs(root: Path, out: str, methods=("affine-full",), epochs=6):
    for number, name in enumerate(("apples", "pears", "plums")):
        if not (root / "domains" / name).exists():
            make_folder(root / "domains" / name, train=8 + number)
    recipe = get_recipe("quick", side=32, epochs=epochs, batch_size=4)
    suite = find_suite(str(root / "domains"), None)
    base = BaseName("efficientnet-lite0")
    return make_plan(Request(suite, base, methods, (0, 1), Protocol(recipe), root / out))[1]


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


class Cluster:
    """Two nodes of one CPU each, and the processes that make them up."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as Nodes

        self.nodes = Nodes(
            initialize_head=True, head_node_args=node_settings() | {"include_dashboard": False}
        )
        self.second = self.nodes.add_node(**node_settings())
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

    def workers(self, node) -> list[int]:
        """The processes that do a job on a node."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        found = [p for p in raylet.children(recursive=True) if "ray::work" in p.name()]
        return [p.pid for p in found] or [
            p.pid for p in raylet.children(recursive=True) if "ray::work" in " ".join(p.cmdline())
        ]

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
            pid
            for pid in self.pids
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        ]


@pytest.fixture
def cluster():
    cluster = Cluster()
    yield cluster
    if not cluster.nodes.list_all_nodes():
        return
    cluster.stop()


class Disaster(Watcher):
    """Kills the worker of the first node, then the second node, in the middle of their jobs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.starts, self.shares = cluster, Counter(), []
        self.killed, self.lost = [], False

    def started(self, job):
        self.starts["/".join(job.folder.parts[-3:])] += 1

    def progressed(self, job, share, note):
        self.shares.append(share)
        if not 0.2 < share < 0.8:
            return
        self.cluster.note()
        if not self.killed:
            self.killed = self.cluster.workers(self.cluster.nodes.head_node)
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)
        elif not self.lost and self.cluster.workers(self.cluster.second):
            self.cluster.nodes.remove_node(self.cluster.second, allow_graceful=False)
            self.lost = True


def test_jobs_survive_a_killed_worker_and_a_lost_node_to_the_same_bytes(cluster, tmp_path):
    local = make_jobs(tmp_path, "local")
    assert len(local) == 6
    run_jobs(local, threads=1)
    jobs = make_jobs(tmp_path, "ray")
    disaster = Disaster(cluster)
    found = run_jobs(jobs, engine="ray", address=cluster.address, threads=1, watcher=disaster)
    assert len(found) == 6
    assert disaster.killed
    assert disaster.lost
    assert sum(disaster.starts.values()) >= 8  # two jobs were started again
    assert files_of(jobs) == files_of(local)
    begins = [
        json.loads(line)["epoch"]
        for job in jobs
        for line in (job.folder / "log.jsonl").read_text().splitlines()
        if json.loads(line)["event"] == "begin"
    ]
    assert max(begins) > 0  # and went on where they were cut
    assert not list((tmp_path / "ray").rglob(".*"))
    cluster.stop()
    assert cluster.left() == []


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


def test_auto_without_a_cluster_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    jobs = make_jobs(tmp_path, "ray", ("classifier-only",))
    with pytest.raises(pm.EngineError, match="no Ray cluster at auto"):
        run_jobs(jobs, engine="ray", address="auto")
