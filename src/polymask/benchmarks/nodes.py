"""What runs on the nodes of a Ray cluster, and what they share: the checks before any job, the jobs, a folder at a URL.

Imports no ray. Nodes that share no file system get a shared folder: any URL that fsspec has a file system for. A job's
folder is mirrored there. A file appears in it whole or not at all: it is written under another name, then renamed.
"""

import hashlib
import os
import platform
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from polymask import __version__
from polymask.benchmarks.jobs import BaseName, Job, load_domain_data, run_job
from polymask.benchmarks.local import JobProgress
from polymask.benchmarks.records import RESULT
from polymask.errors import EngineError, InterruptedTraining, PolymaskError
from polymask.files import write_atomically
from polymask.train.fit import Listener, Together
from polymask.train.recipe import Recipe

Stamp = tuple[int, int]  # of a file: when it was changed, and its size

_UNFINISHED = ".tmp"
_PAUSE = 0.5  # seconds between two messages of a job's progress


class SharedFolder:
    """The folder at a path or a URL; an error of its file system is an `EngineError`."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url
        try:
            self.files, root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise EngineError(
                f"{url} cannot be opened ({error}); give a URL such as s3://BUCKET/runs, and install what fsspec "
                "needs for it"
            ) from error
        self.root = str(root).rstrip("/")

    def read(self, name: str) -> bytes | None:
        """The content of a file, or None where there is none."""
        with self._explained():
            self.files.invalidate_cache()
            try:
                return bytes(self.files.cat_file(f"{self.root}/{name}"))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        with self._explained():
            place = PurePosixPath(f"{self.root}/{name}")
            unfinished = str(place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}{_UNFINISHED}"))
            self.files.makedirs(str(place.parent), exist_ok=True)
            self.files.pipe_file(unfinished, data)
            self.files.mv(unfinished, str(place))

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with self._explained():
            if self.files.exists(f"{self.root}/{name}"):
                self.files.rm_file(f"{self.root}/{name}")

    def names(self, folder: str) -> set[str]:
        """The finished files in a folder and in the folders in it, named from that folder."""
        with self._explained():
            self.files.invalidate_cache()
            place = f"{self.root}/{folder}"
            start = len(self.files._strip_protocol(place)) + 1
            files = [str(path)[start:] for path in self.files.find(place)]
            return {path for path in files if not path.endswith(_UNFINISHED)}

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EngineError(
                f"{self.url} cannot be used ({error}); check that it exists and that this machine may read and write it"
            ) from error


class Mirror(Listener):
    """A job's folder on this machine, and its copy in a shared folder.

    As a listener of the job's training it copies what is new at the first step after a checkpoint.
    """

    def __init__(self, shared: SharedFolder, name: str, folder: Path) -> None:
        self.shared, self.name, self.folder = shared, name, folder
        self.same: dict[str, Stamp] = {}  # files that are alike in both

    def pull(self) -> None:
        """Make the folder here what the shared one is."""
        wanted = self.shared.names(self.name)
        for gone in self._here().keys() - wanted:
            (self.folder / gone).unlink()
        for name in sorted(wanted):
            content = self.shared.read(f"{self.name}/{name}")
            if content is not None:  # else it has just been deleted
                place = self.folder / name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
        self.same = self._here()

    def push(self) -> None:
        """Make the shared folder what the folder here is; a job's result comes last."""
        here = self._here()
        changed = [name for name, stamp in here.items() if self.same.get(name) != stamp]
        for name in sorted(changed, key=lambda name: (name.endswith(RESULT), name)):
            self.shared.write(f"{self.name}/{name}", (self.folder / name).read_bytes())
        for gone in self.same.keys() - here.keys():
            self.shared.delete(f"{self.name}/{gone}")
        self.same = here

    def begin(self, recipe: Recipe, steps: int, epoch: int) -> None:
        self.push()

    def step(self, epoch: int, step: int, loss: float, images: int, density: float | None) -> None:
        here = self._here()
        changed = (name for name, stamp in here.items() if stamp != self.same.get(name))
        if here.keys() != self.same.keys() or any(name.endswith(".checkpoint") for name in changed):
            self.push()

    def end(self) -> None:
        self.push()

    def _here(self) -> dict[str, Stamp]:
        found: dict[str, Stamp] = {}
        for path in self.folder.rglob("*"):
            if path.is_file() and not path.name.endswith(_UNFINISHED):
                stat = path.stat()
                found[path.relative_to(self.folder).as_posix()] = (stat.st_mtime_ns, stat.st_size)
        return found


@dataclass(frozen=True)
class DriverInfo:
    """What every node must find as the driver has it: plain data, sent along with every job.

    `token` is the name and the content of a file in `root`: a folder by its path, or by its URL.
    """

    root: str
    token: tuple[str, str]
    folder: str  # the driver's own; relative paths are meant from there
    versions: str
    remote: bool  # root is a URL

    def trouble(self) -> str | None:
        """Why this node cannot take part, or None."""
        name, content = self.token
        if self.versions != versions():
            return f"it has {versions()}, not {self.versions}; install the same"
        try:
            found = SharedFolder(self.root).read(name)
        except EngineError as error:
            return str(error)
        if found is None or found.decode() != content:
            return (
                f"it does not see what the driver wrote to {self.root}; give --out in a folder that all nodes share, "
                "or --shared URL"
            )
        return None


def check_node(driver: DriverInfo, jobs: Sequence[Job]) -> tuple[str | None, dict[str, str]]:
    """Why this node cannot take part, if it cannot; and how many images of each domain it sees."""
    trouble = driver.trouble()
    if trouble is not None:
        return trouble, {}
    with _in_folder_of(driver):
        return None, count_images(jobs)


def count_images(jobs: Sequence[Job]) -> dict[str, str]:
    """Classes and images of every domain of the jobs, or the error that reading them gives."""
    sources = {name: (source, job.protocol) for job in reversed(jobs) for name, source in job.domains}
    found = {}
    for name, (source, protocol) in sources.items():
        try:
            data = load_domain_data(name, source, protocol)
        except PolymaskError as error:
            found[name] = str(error)
        else:
            sizes = ", ".join(f"{len(split)} {part}" for part, split in data.splits().items())
            found[name] = f"{len(data.classes)} classes, {sizes} images"
    return found


def work(number: int, job: Job, driver: DriverInfo, threads: int, board: Any) -> tuple[str, str | None]:
    """Do one job; "finished", or "failed" and why. Stopped by a signal, it raises and can go on.

    `board` is the actor of a Ray queue, which is told how the job goes; nobody waits for it.
    """
    trouble = driver.trouble()
    if trouble is not None:
        return "failed", f"node {platform.node()}: {trouble}"
    torch.set_num_threads(threads)
    board.put_nowait.remote(("started", number))
    last = 0.0

    def tell(share: float, note: str) -> None:
        nonlocal last
        if time.monotonic() - last > _PAUSE:
            board.put_nowait.remote(("progressed", number, share, note))
            last = time.monotonic()

    try:
        with _in_folder_of(driver), _mirrored(job, driver) as (here, mirror):
            run_job(here, Together(JobProgress(tell), mirror))
    except InterruptedTraining:
        raise
    except PolymaskError as error:
        return "failed", str(error)
    return "finished", None


def shared_name(job: Job) -> str:
    """A job's folder in a shared folder: METHOD/DOMAIN/seed-N, of a search search/VALUE/METHOD/DOMAIN/seed-N."""
    return "/".join(job.folder.parts[-5 if job.protocol.searching else -3 :])


def versions() -> str:
    """What must be the same everywhere for results to be the same."""
    return f"polymask {__version__}, torch {torch.__version__}, {platform.machine()}"


@contextmanager
def _mirrored(job: Job, driver: DriverInfo) -> Iterator[tuple[Job, Listener]]:
    """The job as it is done here, and what keeps its shared folder up to date."""
    if not driver.remote:
        job.folder.mkdir(parents=True, exist_ok=True)
        for leftover in job.folder.rglob(".*.tmp"):  # of a worker that was killed
            leftover.unlink(missing_ok=True)
        yield job, Listener()
        return
    shared, name = SharedFolder(driver.root), shared_name(job)
    key = hashlib.sha256(f"{driver.root} {name}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), "polymask-jobs", key)
    shutil.rmtree(folder, ignore_errors=True)  # of a job that was killed: what is shared may be newer
    folder.mkdir(parents=True)
    mirror = Mirror(shared, name, folder)
    mirror.pull()
    try:
        yield replace(job, folder=folder, base=_fetched(job.base, shared)), mirror
    finally:
        mirror.push()
        shutil.rmtree(folder, ignore_errors=True)


def _fetched(base: BaseName, shared: SharedFolder) -> BaseName:
    """The base from a file of this node, copied once from the shared folder."""
    assert base.file is not None  # the driver copied it
    name = base.file.name
    file = Path(tempfile.gettempdir(), "polymask-bases", name)
    if not file.exists():
        content = shared.read(name)
        if content is None:
            raise EngineError(f"{shared.url} has lost {name}; start the driver again")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
    return base.at(file)


def _in_folder_of(driver: DriverInfo) -> Any:
    """Relative paths mean what they mean to the driver, where this node has its folder."""
    return chdir(driver.folder) if os.path.isdir(driver.folder) else nullcontext()  # noqa: PTH112
