"""Jobs by one call, and what is said before any of them starts."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

import polymask as pm
from image_folders import make_folder
from polymask.benchmarks import ray as ray_engine
from polymask.benchmarks.jobs import BaseName
from polymask.benchmarks.local import Tally, Watcher
from polymask.benchmarks.nodes import DriverInfo, check_node, count_images, shared_name, versions
from polymask.benchmarks.planning import Request, final_jobs, make_plan
from polymask.benchmarks.suites import Protocol, find_suite
from polymask.errors import InterruptedTraining
from polymask.train.recipe import get_recipe

QUICK = get_recipe("quick", side=32, epochs=1, batch_size=8)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    root = tmp_path_factory.mktemp("shapes")
    for name in ("apples", "pears"):
        make_folder(root / "domains" / name)
    suite = find_suite(str(root / "domains"), None)
    base, protocol = BaseName("efficientnet-lite0"), Protocol(QUICK)
    request = Request(suite, base, ["classifier-only"], [0], protocol, root / "runs")
    return final_jobs(request, make_plan(request))


def driver(folder: Path, **changes):
    given = {
        "root": str(folder),
        "token": (".token", "secret"),
        "folder": str(folder),
        "versions": versions(),
        "remote": False,
    }
    return DriverInfo(**given | changes)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_an_engine_that_is_not_there_is_named(jobs):
    with pytest.raises(pm.EngineError, match="'slurm' is not one of local, ray"):
        pm.run_jobs(jobs, engine="slurm")
    with pytest.raises(pm.EngineError, match="workers=0"):
        pm.run_jobs(jobs, workers=0)


def test_without_ray_the_engine_says_what_to_install(jobs, monkeypatch):
    monkeypatch.setattr(ray_engine, "find_spec", lambda name: None)
    with pytest.raises(pm.EngineError, match=r"pip install 'polymask\[ray\]'"):
        pm.run_jobs(jobs, engine="ray")
    assert not any(job.folder.exists() for job in jobs)


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:port"])
def test_an_address_that_is_none_is_refused(jobs, address):
    with pytest.raises(pm.EngineError, match="give auto, or HOST:PORT"):
        pm.run_jobs(jobs, engine="ray", address=address)


def test_an_address_without_a_cluster_is_told_at_once(jobs):
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(pm.EngineError, match=f"no Ray cluster at {address} .*refused"):
        pm.run_jobs(jobs, engine="ray", address=address)
    assert not any(job.folder.exists() for job in jobs)


class Nothing:
    """A ray that finds no cluster, as ray says it."""

    @staticmethod
    def is_initialized():
        return False

    @staticmethod
    def init(address, **options):
        raise ConnectionError("Could not find any running Ray instance.")


@pytest.mark.parametrize(("address", "where"), [("auto", "at auto"), (None, "on this machine")])
def test_where_ray_finds_no_cluster_the_engine_says_what_to_do(address, where, jobs, monkeypatch):
    monkeypatch.setattr(ray_engine, "_import_ray", Nothing)
    with pytest.raises(pm.EngineError, match=rf"no Ray cluster {where} \(Could.*ray start --head"):
        pm.run_jobs(jobs, engine="ray", address=address)
    assert not any(job.folder.exists() for job in jobs)


def test_a_job_must_take_something_of_a_node(jobs):
    with pytest.raises(pm.EngineError, match="more than 0 CPUs"):
        pm.run_jobs(jobs, engine="ray", cpus_per_job=0)


def test_a_stop_says_how_far_the_jobs_are(jobs):
    class Stops(Watcher):
        def started(self, job):
            raise KeyboardInterrupt

    with pytest.raises(InterruptedTraining, match="stopped with 0 of 2 jobs done"):
        pm.run_jobs(jobs, watcher=Stops())


def test_a_node_that_does_not_see_the_drivers_folder_says_so(tmp_path):
    here = driver(tmp_path)
    assert "does not see what the driver wrote" in here.trouble()
    (tmp_path / ".token").write_text("of another run")
    assert "does not see what the driver wrote" in here.trouble()
    (tmp_path / ".token").write_text("secret")
    assert here.trouble() is None


def test_memory_of_one_process_is_not_a_shared_folder():
    there = driver(Path("/"), root="memory://runs", remote=True)
    assert "--shared URL" in there.trouble()


def test_a_node_with_other_versions_says_which(tmp_path):
    assert "not polymask 0.0; install the same" in driver(tmp_path, versions="polymask 0.0").trouble()


def test_a_node_counts_the_images_that_it_sees(jobs, tmp_path):
    (tmp_path / ".token").write_text("secret")
    trouble, found = check_node(driver(tmp_path), jobs)
    assert trouble is None
    assert found == count_images(jobs)
    assert found["apples"].startswith("2 classes, ")
    lost = replace(jobs[0], domains=(("apples", str(tmp_path / "nowhere")),))
    assert "nowhere" in count_images([lost])["apples"]


class Answers:
    """A ray whose one node gives one answer."""

    class exceptions:  # noqa: N801
        RayError = RuntimeError

    def __init__(self, answer):
        self.answer = answer

    def get(self, reference):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((None, {"apples": "3 classes"}), "node 10.0.0.7 has other images of apples"),
        (("it has polymask 0.0", {}), "node 10.0.0.7: it has polymask 0.0"),
        (RuntimeError("…\nNo module named 'polymask'"), "cannot run jobs .No module named"),
    ],
)
def test_what_is_wrong_with_a_node_is_an_error_that_names_it(answer, said):
    with pytest.raises(pm.EngineError, match=said):
        ray_engine.check_answer(Answers(answer), None, "10.0.0.7", {"apples": "2 classes"})


def test_jobs_have_a_name_of_their_own_in_a_shared_folder(jobs):
    assert shared_name(jobs[0]) == "classifier-only/apples/seed-0"
    trials = [
        replace(
            jobs[0],
            folder=Path("out/search") / f"rate={rate}" / shared_name(jobs[0]),
            protocol=replace(jobs[0].protocol, searching=True),
        )
        for rate in ("0.001", "0.003")
    ]
    assert shared_name(trials[0]) == "search/rate=0.001/classifier-only/apples/seed-0"
    assert len({shared_name(job) for job in (jobs[0], *trials)}) == 3
    twin = replace(jobs[1], folder=Path("elsewhere") / shared_name(jobs[0]))
    options = ray_engine.RayOptions(shared="memory://runs")
    with pytest.raises(pm.EngineError, match="2 jobs have 1 names"):
        ray_engine._Run(None, Tally([jobs[0], twin]), options)
