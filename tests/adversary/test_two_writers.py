"""Two processes that write the same file: one is told of the other, and neither loses what it has."""

import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from image_folders import make_folder
from polymask.cli import main
from polymask.errors import FileError
from polymask.files import locked, write_atomically

HOLD = """
import sys, time
from pathlib import Path
from polymask.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
WRITE = """
import os, sys, time
from pathlib import Path
from polymask.files import write_atomically
finish = os.fsync
def slowly(descriptor):
    print("written", flush=True)
    sys.stdin.readline()
    finish(descriptor)
os.fsync = slowly
write_atomically(Path(sys.argv[1]), b"the first")
"""


@pytest.fixture
def started():
    """Starts a program that runs beside the test until it is told to go on, or killed."""
    running = []

    def start(program: str, path: Path) -> subprocess.Popen:
        words = [sys.executable, "-c", program, str(path)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout.readline()
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_a_second_learn_of_a_name_is_refused_and_touches_nothing(tmp_path, capsys, started):
    library, work = tmp_path / "library", tmp_path / "library" / "d.run"
    work.mkdir(parents=True)
    names = [".d.safetensors.1.2.tmp", "d.run/.checkpoint.safetensors.1.2.tmp", "d.run/checkpoint.safetensors"]
    for name in names:
        (library / name).write_bytes(b"the first's")
    first = started(HOLD, library / "d.safetensors")
    for more in ([], ["--fresh"], ["--force"], ["--resume"]):
        assert main(["learn", "d", "--data", str(tmp_path), "--out", str(library), *more]) == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert f"d.safetensors is being made by process {first.pid} on {platform.node()} since 20" in line
    assert all((library / name).read_bytes() == b"the first's" for name in names)


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, started):
    first = started(HOLD, tmp_path / "d.safetensors")
    with pytest.raises(FileError, match=f"process {first.pid} on"), locked(tmp_path / "d.safetensors"):
        pass
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    (left,) = tmp_path.iterdir()
    with locked(tmp_path / "d.safetensors"):
        assert re.match(rf"process {os.getpid()} on .* since ", left.read_text())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", [ValueError, KeyboardInterrupt])
def test_a_lock_is_gone_after_any_end_and_so_is_a_folder_made_for_it(end, tmp_path):
    with pytest.raises(end), locked(tmp_path / "new" / "library" / "d.safetensors"):
        raise end
    assert list(tmp_path.iterdir()) == []


def test_a_learn_that_fails_or_is_interrupted_leaves_no_lock(tmp_path, monkeypatch):
    from polymask.cli.learn import LearnVerb

    def interrupt(self, recipe, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(LearnVerb, "train", interrupt)
    folder = make_folder(tmp_path / "pictures")
    assert main(["learn", "d", "--data", str(folder), "--out", str(tmp_path / "library")]) == 130
    assert main(["learn", "d", "--data", str(tmp_path / "none"), "--out", str(tmp_path / "library")]) == 1
    assert not (tmp_path / "library").exists()


def test_what_another_process_is_writing_is_kept_and_what_a_dead_one_left_is_removed(tmp_path, started):
    path = tmp_path / "d[1].safetensors"
    dead = tmp_path / ".d[1].safetensors.1.2.tmp"
    dead.write_bytes(b"half")
    first = started(WRITE, path)
    (written,) = tmp_path.iterdir()
    dead.write_bytes(b"half")
    write_atomically(path, b"the second")
    assert sorted(tmp_path.iterdir()) == sorted([path, written])
    assert path.read_bytes() == b"the second"
    first.communicate("\n")
    assert first.returncode == 0
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"the first"


def test_what_cannot_be_written_is_said_and_not_what_cannot_be_cleared_away(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"file/x cannot be written: (Not a directory|File exists)"):
        write_atomically(tmp_path / "file" / "x", b"")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="a cannot be written: No space left on device"):
        write_atomically(tmp_path / "a", b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_process_of_the_same_number_left_does_not_get_into_a_file(tmp_path):
    from threading import get_ident

    (tmp_path / f".a.{os.getpid()}.{get_ident()}.tmp").write_bytes(b"a long half of a file")
    write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
