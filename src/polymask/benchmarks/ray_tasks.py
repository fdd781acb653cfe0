"""What runs on the nodes of a Ray cluster: a look around, then jobs. Imports no ray."""

import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from polymask import __version__
from polymask.benchmarks.jobs import BaseName, Job, load_domain_data, run_job
from polymask.benchmarks.local import JobProgress
from polymask.benchmarks.shared_folder import Mirror, SharedFolder
from polymask.errors import EngineError, InterruptedTraining, PolymaskError
from polymask.train.fit import Listener, Together

_PAUSE = 0.5  # seconds between two messages of a job's progress


@dataclass(frozen=True)
class Meeting:
    """What all nodes must find alike: plain data, sent along with every job.

    `token` is the name and the content of a file in `root`: a folder by its path, or by its URL.
    """

    root: str
    token: tuple[str, str]
    folder: str  # where the driver stands; relative paths are meant from there
    versions: str
    remote: bool  # root is a URL

    def check(self) -> str | None:
        """Why this node cannot take part, or None."""
        name, content = self.token
        if self.versions != versions():
            return f"it has {versions()}, not {self.versions}; install the same"
        try:
            found = self._read(name)
        except EngineError as error:
            return str(error)
        if found is None or found.decode() != content:
            return (
                f"it does not see what the driver wrote to {self.root}; give --out in a folder "
                "that all nodes share, or --shared URL"
            )
        return None

    def _read(self, name: str) -> bytes | None:
        if self.remote:
            return SharedFolder(self.root).read(name)
        file = Path(self.root, name)
        return file.read_bytes() if file.exists() else None


def look_around(meeting: Meeting, jobs: Sequence[Job]) -> tuple[str | None, dict[str, str]]:
    """Why this node cannot take part, if it cannot; and how many images of each domain it sees."""
    why = meeting.check()
    if why is not None:
        return why, {}
    with _standing_in(meeting.folder):
        return None, count_images(jobs)


def count_images(jobs: Sequence[Job]) -> dict[str, str]:
    """Classes and images of every domain of the jobs, or the error that reading them gives."""
    found: dict[str, str] = {}
    for job in jobs:
        for name, source in job.domains:
            if name in found:
                continue
            try:
                data = load_domain_data(name, source, job.protocol)
            except PolymaskError as error:
                found[name] = str(error)
                continue
            sizes = ", ".join(f"{len(split)} {part}" for part, split in data.splits().items())
            found[name] = f"{len(data.classes)} classes, {sizes} images"
    return found


def work(number: int, job: Job, meeting: Meeting, threads: int, board: Any) -> tuple[str, str | None]:
    """Do one job; "finished", or "failed" and why. Stopped by a signal, it raises and can go on.

    `board` is the actor of a Ray queue, which is told how the job goes; nobody waits for it.
    """
    why = meeting.check()
    if why is not None:
        return "failed", f"node {platform.node()}: {why}"
    torch.set_num_threads(threads)
    board.put_nowait.remote(("started", number))
    try:
        with _standing_in(meeting.folder), _mirrored(job, meeting) as (here, mirror):
            run_job(here, Together(JobProgress(_Teller(board, number)), mirror))
    except InterruptedTraining:
        raise
    except PolymaskError as error:
        return "failed", str(error)
    return "finished", None


def shared_name(job: Job) -> str:
    """A job's folder in a shared folder: METHOD/DOMAIN/seed-N."""
    return "/".join(job.folder.parts[-3:])


def versions() -> str:
    """What must be the same everywhere for results to be the same."""
    return f"polymask {__version__}, torch {torch.__version__}, {platform.machine()}"


class _Teller:
    """Tells of progress, now and then."""

    def __init__(self, board: Any, number: int) -> None:
        self.board, self.number, self.last = board, number, 0.0

    def __call__(self, share: float, note: str) -> None:
        now = time.monotonic()
        if now - self.last > _PAUSE:
            self.board.put_nowait.remote(("progressed", self.number, share, note))
            self.last = now


@contextmanager
def _mirrored(job: Job, meeting: Meeting) -> Iterator[tuple[Job, Listener]]:
    """The job as it is done here, and what keeps its shared folder up to date."""
    if not meeting.remote:
        job.folder.mkdir(parents=True, exist_ok=True)
        for leftover in job.folder.rglob(".*.tmp"):  # of a worker that was killed
            leftover.unlink(missing_ok=True)
        yield job, Listener()
        return
    shared, name = SharedFolder(meeting.root), shared_name(job)
    key = hashlib.sha256(f"{meeting.root} {name}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), "polymask-jobs", key)
    folder.mkdir(parents=True, exist_ok=True)
    mirror = Mirror(shared, name, folder)
    try:
        mirror.pull()
        yield replace(job, folder=folder, base=_fetched(job.base, shared)), mirror
    finally:
        mirror.push()
        shutil.rmtree(folder, ignore_errors=True)


def _fetched(base: BaseName, shared: SharedFolder) -> BaseName:
    """The base from a file of this node, copied once from the shared folder."""
    from polymask.files import write_atomically

    by_path = base.weights is None
    name = Path(base.name if by_path else str(base.weights)).name
    file = Path(tempfile.gettempdir(), "polymask-bases", name)
    if not file.exists():
        content = shared.read(name)
        if content is None:
            raise EngineError(f"{shared.url} has lost {name}; start the driver again")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
    return replace(base, name=str(file)) if by_path else replace(base, weights=file)


def _standing_in(folder: str) -> Any:
    """Relative paths mean what they mean to the driver, where this node has its folder."""
    return chdir(folder) if os.path.isdir(folder) else nullcontext()  # noqa: PTH112
