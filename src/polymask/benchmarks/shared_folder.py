"""What the nodes of a cluster share: a job's folder, mirrored at a URL, and one file of the base.

A job's base is one read-only file that every node maps into memory (`nets.base_file.write_aligned`).

A folder at a URL, for nodes that share no file system: a job's folder is mirrored there.

Any URL that fsspec has a file system for. A file appears whole or not at all: it is written under
another name first, then renamed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from polymask.benchmarks.jobs import BaseName
from polymask.core.network import digest_tensors
from polymask.errors import EngineError
from polymask.files import SUFFIX
from polymask.nets.base_file import read_metadata, read_state, write_aligned
from polymask.nets.zoo import build
from polymask.train.fit import Listener
from polymask.train.learner import EpochRecord
from polymask.train.recipe import Recipe


def copy_base(base: BaseName, folder: Path) -> BaseName:
    """Write the base's tensors to `folder`, and say how to load it from there.

    What is loaded has the name, the input and the fingerprint of the original.
    """
    by_path = base.name.endswith(SUFFIX)
    source = Path(base.name) if by_path else base.weights
    if source is not None and source.suffix == SUFFIX:
        state, notes = read_state(source), read_metadata(source)
    else:
        net, _ = build(base.name, weights=base.weights)
        state, notes = dict(net.state_dict()), {}
    file = folder.absolute() / f"base-{digest_tensors(state)[:16]}{SUFFIX}"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_aligned(file, state, notes)
        file.chmod(0o444)
    return replace(base, name=str(file)) if by_path else replace(base, weights=file)


Result = TypeVar("Result")
Stamp = tuple[int, int]  # of a file: when it was changed, and its size

_UNFINISHED = ".tmp"


class SharedFolder:
    """The folder at a URL."""

    def __init__(self, url: str) -> None:
        if find_spec("fsspec") is None:
            raise EngineError(f"{url} needs fsspec, which is not installed; pip install fsspec")
        from fsspec.core import url_to_fs

        self.url = url
        try:
            self.files, root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise EngineError(
                f"{url} cannot be opened ({error}); give a URL such as s3://BUCKET/runs, and "
                "install what fsspec needs for it"
            ) from error
        self.root = str(root).rstrip("/")

    def read(self, name: str) -> bytes | None:
        """The content of a file, or None where there is none."""

        def content() -> bytes | None:
            self.files.invalidate_cache()
            try:
                found: bytes = self.files.cat_file(self._at(name))
            except FileNotFoundError:
                return None
            return found

        return self._tried(content)

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file."""

        def put() -> None:
            place, beside = self._at(name), self._beside(name)
            self.files.makedirs(str(PurePosixPath(place).parent), exist_ok=True)
            self.files.pipe_file(beside, data)
            self.files.mv(beside, place)

        self._tried(put)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""

        def remove() -> None:
            if self.files.exists(self._at(name)):
                self.files.rm_file(self._at(name))

        self._tried(remove)

    def names(self, folder: str) -> set[str]:
        """The finished files in a folder and those in it, named from that folder."""

        def found() -> set[str]:
            self.files.invalidate_cache()
            place = self._at(folder)
            start = len(self.files._strip_protocol(place)) + 1
            files = [str(path)[start:] for path in self.files.find(place)]
            return {path for path in files if not path.endswith(_UNFINISHED)}

        return self._tried(found)

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _beside(self, name: str) -> str:
        path = PurePosixPath(self._at(name))
        return str(path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_UNFINISHED}"))

    def _tried(self, action: Callable[[], Result]) -> Result:
        try:
            return action()
        except OSError as error:
            raise EngineError(
                f"{self.url} cannot be used ({error}); check that it exists, and that this machine "
                "may read and write it"
            ) from error


class Mirror(Listener):
    """A job's folder on this machine, and its copy in a shared folder.

    As a listener of the job's training it copies what is new after every step that follows a
    checkpoint.
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
            if content is None:  # it has just been deleted
                continue
            place = self.folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        self.same = self._here()

    def push(self) -> None:
        """Make the shared folder what the folder here is; a job's result comes last."""
        here = self._here()
        changed = [name for name, stamp in here.items() if self.same.get(name) != stamp]
        for name in sorted(changed, key=lambda name: (name.endswith("result.json"), name)):
            self.shared.write(f"{self.name}/{name}", (self.folder / name).read_bytes())
        for gone in self.same.keys() - here.keys():
            self.shared.delete(f"{self.name}/{gone}")
        self.same = here

    def begin(self, recipe: Recipe, steps: int, epoch: int) -> None:
        self.push()

    def step(self, epoch: int, step: int, loss: float, images: int, density: float | None) -> None:
        here = self._here()
        if here.keys() != self.same.keys() or self._has_new_checkpoint(here):
            self.push()

    def epoch(self, record: EpochRecord, seconds: float) -> None:
        """The epoch's checkpoint is yet to be written: see `step`."""

    def end(self) -> None:
        self.push()

    def _has_new_checkpoint(self, here: dict[str, Stamp]) -> bool:
        return any(stamp != self.same.get(name) for name, stamp in here.items() if name.endswith(".checkpoint"))

    def _here(self) -> dict[str, Stamp]:
        found: dict[str, Stamp] = {}
        for path in self.folder.rglob("*"):
            if path.is_file() and not path.name.endswith(_UNFINISHED):
                stat: Any = path.stat()
                found[path.relative_to(self.folder).as_posix()] = (stat.st_mtime_ns, stat.st_size)
        return found
