"""A job's folder and its copy at a URL."""

import tempfile
import uuid
from pathlib import Path

import pytest

import polymask as pm
from polymask.benchmarks.jobs import BaseName, Job
from polymask.benchmarks.nodes import DriverInfo, Mirror, SharedFolder, _mirrored, shared_name
from polymask.benchmarks.suites import Protocol
from polymask.train.recipe import get_recipe


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/runs"
    return f"file://{tmp_path / 'shared'}"


def write(folder, **files):
    for name, text in files.items():
        place = folder / name.replace("__", "/").replace("_", ".")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_a_file_is_there_whole_or_not_at_all(url):
    shared = SharedFolder(url)
    assert shared.read("a/b") is None
    shared.write("a/b", b"one")
    shared.write("a/b", b"two")
    assert shared.read("a/b") == b"two"
    assert shared.names("a") == {"b"}
    shared.delete("a/b")
    shared.delete("a/b")
    assert shared.read("a/b") is None


def test_what_one_node_pushes_another_pulls(url, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    write(here, log_jsonl="begin", packs__learned__a_checkpoint="1")
    one = Mirror(SharedFolder(url), "method/domain/seed-0", here)
    one.push()
    write(there, old="from an earlier try")
    two = Mirror(SharedFolder(url), "method/domain/seed-0", there)
    two.pull()
    assert contents(there) == contents(here)
    assert contents(there)["packs/learned/a.checkpoint"] == "1"


def test_only_what_has_changed_is_copied_and_what_is_gone_is_deleted(url, tmp_path, monkeypatch):
    write(tmp_path / "job", log_jsonl="begin", a_checkpoint="1")
    mirror = Mirror(SharedFolder(url), "job", tmp_path / "job")
    mirror.push()
    sent = []
    monkeypatch.setattr(mirror.shared, "write", lambda name, data: sent.append(name))
    mirror.push()
    assert sent == []
    write(tmp_path / "job", a_checkpoint="22", result_json="{}", packs__a="pack")
    (tmp_path / "job" / "log.jsonl").unlink()
    mirror.push()
    assert sent == ["job/a.checkpoint", "job/packs/a", "job/result.json"]  # the result comes last
    assert mirror.shared.read("job/log.jsonl") is None


def test_a_checkpoint_is_copied_at_the_next_step_and_a_log_line_waits(url, tmp_path):
    write(tmp_path / "job", log_jsonl="begin", a_checkpoint="1")
    shared = SharedFolder(url)
    mirror = Mirror(shared, "job", tmp_path / "job")
    mirror.push()
    write(tmp_path / "job", log_jsonl="begin epoch")
    mirror.step(0, 1, 0.5, 8, None)
    assert shared.read("job/log.jsonl") == b"begin"
    write(tmp_path / "job", a_checkpoint="22")
    mirror.step(0, 2, 0.5, 8, None)
    assert shared.read("job/a.checkpoint") == b"22"
    write(tmp_path / "job", log_jsonl="begin epoch end")
    mirror.end()
    assert shared.read("job/log.jsonl") == b"begin epoch end"


def test_unfinished_files_are_not_copied(url, tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / ".a.checkpoint.77.1.tmp").write_text("half")
    mirror = Mirror(SharedFolder(url), "job", tmp_path / "job")
    mirror.push()
    assert mirror.shared.names("job") == set()


def test_a_url_of_no_known_kind_is_refused():
    with pytest.raises(pm.EngineError, match="gopher://x/runs cannot be opened"):
        SharedFolder("gopher://x/runs")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(pm.EngineError, match="may read and write it"):
        SharedFolder(f"file://{tmp_path}/file/runs").write("a", b"1")


@pytest.fixture
def remote(url, tmp_path, monkeypatch):
    """A job that is done on a node, in the folder that an earlier worker of it left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = Path("runs/bn-only/apples/seed-0")
    job = Job(BaseName("base.safetensors"), "bn-only", "bn-only", (), 0, "", Protocol(get_recipe("quick")), 2, folder)
    shared = SharedFolder(url)
    shared.write("base.safetensors", b"weights")
    shared.write(f"{shared_name(job)}/log.jsonl", b"newer")
    driver = DriverInfo(url, ("", ""), "", "", remote=True)
    with _mirrored(job, driver) as (here, _):
        place = here.folder
    write(place, log_jsonl="older", a_checkpoint="older", packs__learned__a="older")
    (place / ".result.json.77.1.tmp").write_text("half")
    return job, driver, shared


def test_a_node_begins_with_what_is_shared_and_nothing_of_a_worker_that_was_killed(remote):
    job, driver, shared = remote
    with _mirrored(job, driver) as (here, _):
        assert contents(here.folder) == {"log.jsonl": "newer"}
    assert shared.names(shared_name(job)) == {"log.jsonl"}


def test_a_node_that_cannot_read_what_is_shared_writes_nothing_there(remote, monkeypatch):
    job, driver, shared = remote

    def gone(self, folder):
        raise pm.EngineError(f"{self.url} cannot be used")

    with monkeypatch.context() as cut:
        cut.setattr(SharedFolder, "names", gone)
        with pytest.raises(pm.EngineError, match="cannot be used"), _mirrored(job, driver):
            pass
    assert shared.names(shared_name(job)) == {"log.jsonl"}
    assert shared.read(f"{shared_name(job)}/log.jsonl") == b"newer"
