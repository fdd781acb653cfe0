"""Learning that is killed before one of its changes to the disk, and gone on with: a program of its own.

    python killed_learning.py {learn,fit_all} METHOD FOLDER [PLACE …]

It learns once undisturbed and counts the events: files that are opened to write, locked, synchronised, renamed and
removed, folders that are made. Then, for each place (a number from 0 to 1, or "all" for every event), it learns again
in a fork that kills itself by SIGKILL right before that event, goes on in another fork, and compares what is there.
It prints the number of events, and for each event that did not end in the same bytes what was different.
"""

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import polymask as pm
from image_folders import make_folder
from nets import SPEC, block_net
from polymask.cli import main as command
from polymask.cli.verb import BaseVerb
from polymask.data.loader import Loader
from sequences import RECIPE, Patterns, learned_net

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "fcntl.flock")
WRITES = os.O_WRONLY | os.O_RDWR


class Events:
    """Counts what is about to change the disk; kills this process before event number `kill`."""

    def __init__(self, kill: int | None = None) -> None:
        self.count, self.kill = 0, kill
        synchronise = os.fsync

        def fsync(descriptor: int) -> None:
            self._note()
            synchronise(descriptor)

        os.fsync = fsync
        sys.addaudithook(self._audit)

    def _audit(self, event: str, given: tuple) -> None:
        if event in CHANGES or (event == "open" and isinstance(given[0], str) and given[2] & WRITES):
            self._note()

    def _note(self) -> None:
        if self.count == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def in_a_fork(work: Callable[[], None], kill: int | None = None) -> tuple[int, int]:
    """How a child ended that does the work, and how many events it had."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        os.dup2(2, 1)
        try:
            events = Events(kill)
            work()
            os.write(writer, str(events.count).encode())
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        return os.waitstatus_to_exitcode(status), int(said.read() or 0)


def base_of(method: pm.Method) -> pm.Base:
    """Blocks for what routes images, every kind of layer for the rest."""
    return pm.load_base(learned_net() if method.mergeable else block_net(), name="small", input=SPEC)


def learn(base: pm.Base, method: str, images: Path, folder: Path) -> None:
    """The command, with a small base."""
    BaseVerb.open_base = lambda self, name: base
    Loader.throughput = lambda self, seconds: 1.0
    words = ["--data", str(images), "--out", str(folder), "--method", method, "--side", "16", "--resized", "16"]
    if command(["learn", "d", "--resume", *words, "--epochs", "4", "--batch-size", "8"]):
        raise SystemExit("the command failed")


def fit_all(base: pm.Base, method: str, folder: Path) -> None:
    """Two domains, and the base's own where the method wants it."""
    wants = pm.create_method(method)
    own = lesson(100, 8) if wants.needs_own or wants.base_stage else None
    recipe = RECIPE.changed({"epochs": 3, "selection": "best"})
    pm.fit_all(base, {"a": lesson(1), "b": lesson(2)}, method, recipe, own=own, folder=folder, resume=True)


def lesson(domain: int, classes: int = 4) -> pm.Lesson:
    names = [f"class {i}" for i in range(classes)]
    sets = [Patterns(domain, 2, offset, classes) for offset in (0, 5000, 9000)]
    return pm.Lesson(names, *sets)


def written(folder: Path) -> dict[str, bytes | None]:
    """What a run left: packs with their bytes, other files by name."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() if p.suffix == ".safetensors" else None for p in files}


def main() -> None:
    """See above."""
    how, method, room, *places = sys.argv[1:]
    torch.set_num_threads(1)
    base = base_of(pm.create_method(method))
    folder, images = Path(room) / "library", make_folder(Path(room) / "pictures", train=12)

    def work() -> None:
        if how == "learn":
            learn(base, method, images, folder)
        else:
            fit_all(base, method, folder)

    status, events = in_a_fork(work)
    assert status == 0, f"{how} {method} failed undisturbed"
    whole = written(folder)
    assert any(whole.values())
    chosen = range(events) if places == ["all"] else sorted({round(float(p) * (events - 1)) for p in places})
    wrong = {}
    for event in chosen:
        shutil.rmtree(folder)
        killed, _ = in_a_fork(work, event)
        ended, _ = in_a_fork(work)
        found = written(folder)
        differ = sorted(name for name in whole.keys() | found.keys() if whole.get(name, 0) != found.get(name, 0))
        if killed != -signal.SIGKILL or ended or differ:
            wrong[event] = {"killed": killed, "ended": ended, "differ": differ}
    print(json.dumps({"events": events, "tried": len(chosen), "wrong": wrong}))


if __name__ == "__main__":
    main()
