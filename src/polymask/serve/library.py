"""The folder of packs as it is now: every request looks at it, so a new pack is served at once.

A pack is known by its stamp (inode, time, size), and every look compares stamps. So one that is
put, replaced or removed by another process is seen by the next request, without a watcher. A pack
is listed once its head is right: manifest, base, classes and input. Its tensors and its sha256 are
checked when it is loaded, and an upload's before it becomes visible.
"""

import contextlib
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from polymask.core.base import Base
from polymask.core.domain import LIKENESS
from polymask.core.input import InputSpec
from polymask.core.target import CLASSES, Target
from polymask.core.unknown import Judgement, read_judgement
from polymask.data.cache import short_side
from polymask.errors import DomainError, FileBusy, FileError, PackError, PackUnavailable, PolymaskError
from polymask.files import SUFFIX, check_name, locked
from polymask.library.versions import kept_versions, rollback
from polymask.lifelong.removal import remove_pack
from polymask.pack.format import PackInfo, inspect
from polymask.pack.mould import Kind, Mould, kind_of, poured
from polymask.pack.sources import check_sources, dependents, digest_or_none, drawing_on, masks_digest
from polymask.pack.storing import load_domain, target_of
from polymask.serve.settings import Refusal, ServeError, no_domain
from polymask.train.predict import read_likeness

Stamp = tuple[int, int, int]  # inode, time of the last change in ns, bytes

_LEFTOVER = 3600.0  # seconds after which nobody is writing an upload any more


class PackReplaced(PolymaskError):  # noqa: N818 - not a fault
    """A pack is no longer the one that was looked at: look again."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One version of a domain's pack."""

    name: str
    path: Path
    stamp: Stamp
    info: PackInfo
    likeness: Tensor | None = None  # unit vector: what its images look like to the base
    target: Target = CLASSES  # what the outputs of its head mean
    judgement: Judgement | None = None  # how it tells unknown images

    @cached_property
    def key(self) -> str:
        """The name of exactly this version."""
        return f"{self.name}@{'.'.join(map(str, self.stamp))}"

    @cached_property
    def kind(self) -> Kind:
        return kind_of(self.info.manifest)

    @cached_property
    def classes(self) -> list[str]:
        return self.info.manifest.classes or []

    @cached_property
    def input(self) -> InputSpec:
        return InputSpec(**self.info.manifest.input)


class Library:
    """The domains of a folder that fit a base."""

    def __init__(self, folder: Path, base: Base, *, max_side: int, forget: Callable[[str], None]) -> None:
        if not folder.is_dir():
            raise ServeError(f"there is no library at {folder}; give a folder of packs")
        self.folder, self.base, self.max_side, self._forget = folder, base, max_side, forget
        self._lock = threading.Lock()
        self._changing = threading.Lock()  # requests of this process wait for each other, and are not refused
        self._known: dict[str, Entry] = {}
        self._rejected: dict[str, tuple[Stamp, str]] = {}
        self._unread: dict[str, str] = {}  # what the last look could not read, or no domain can be named, and why
        for upload in folder.glob(f".*.upload-*{SUFFIX}.tmp"):  # left behind when a server was killed
            with contextlib.suppress(OSError):
                if time.time() - upload.stat().st_mtime > _LEFTOVER:
                    upload.unlink()

    def find(self, name: str) -> Entry:
        """The domain of this name, as it is on disk now."""
        path = self._path(name)
        for _ in range(10):
            stamp = _stamp(path)
            if stamp is None:
                self._drop(name)
                raise no_domain(name)
            with self._lock:
                known, rejected = self._known.get(name), self._rejected.get(name)
            if known is not None and known.stamp == stamp:
                return known
            if rejected is not None and rejected[0] == stamp:
                raise Refusal(409, f"the pack of {name} cannot be served: {rejected[1]}")
            try:
                info = inspect(path)
                likeness = read_likeness(info.manifest.recipe.get(LIKENESS), self.base.feature_dim)
                judgement = read_judgement(info.manifest.unknown)
                entry = Entry(name, path, stamp, info, likeness, target_of(info.manifest), judgement)
                self._check_head(entry)
            except PackUnavailable as error:
                if _stamp(path) == stamp:  # it may be there again without having changed
                    reason = _without_paths(str(error), path)
                    raise Refusal(503, f"the pack of {name} cannot be served now: {reason}", retry=1) from error
                continue
            except PolymaskError as error:
                if _stamp(path) == stamp:
                    self.reject(name, stamp, _without_paths(str(error), path))
                continue
            if _stamp(path) == stamp:  # what was read is what was stamped
                self._drop(name)
                with self._lock:
                    self._known[name] = entry
        raise Refusal(503, f"the pack of {name} changes too fast", retry=1)

    def entries(self) -> list[Entry]:
        """Every domain that can be served, by name."""
        try:
            files = [path.name for path in self.folder.iterdir()]
        except OSError as error:
            raise Refusal(503, "the library's folder cannot be read") from error
        present = {file.removesuffix(SUFFIX) for file in files if file.endswith(SUFFIX) and file[0] != "."}
        with self._lock:
            gone = (self._known.keys() | self._rejected.keys()) - present
        for name in gone:
            self._drop(name)
        found, unread = [], {}
        for name in sorted(present):
            try:
                check_name(name)
            except DomainError as error:
                unread[name.encode("utf-8", "backslashreplace").decode()] = str(error)
                continue
            try:
                found.append(self.find(name))
            except Refusal as refusal:
                if refusal.status == 503:  # others are remembered, or gone
                    unread[name] = str(refusal)
        self._unread = unread
        return found

    def rejected(self) -> dict[str, str]:
        """Packs of the folder that cannot be served, and why; as of the last look."""
        with self._lock:
            unfit = {name: reason for name, (_, reason) in self._rejected.items()}
        return dict(sorted((self._unread | unfit).items()))

    def load(self, entry: Entry, mould: Mould | None = None) -> Mould:
        """A pack, everything checked, in a mould that may be this one; with scores where it tells unknown images.

        Raises if the file was replaced meanwhile.
        """
        try:
            found = poured(entry.path, self.base, mould)
        except PackError as error:
            if _stamp(entry.path) != entry.stamp:
                raise PackReplaced(f"{entry.name} was replaced") from error
            reason = _without_paths(str(error), entry.path)
            if not isinstance(error, PackUnavailable):  # what is missing may come back, and this pack is as it was
                self.reject(entry.name, entry.stamp, reason)
            raise Refusal(409, f"the pack of {entry.name} cannot be served: {reason}") from error
        if _stamp(entry.path) != entry.stamp:
            raise PackReplaced(f"{entry.name} was replaced")
        return found

    def reject(self, name: str, stamp: Stamp, reason: str) -> None:
        """Stop serving this version of a domain."""
        self._drop(name)
        with self._lock:
            self._rejected[name] = stamp, reason

    def new_upload(self, name: str) -> Path:
        """An empty hidden file in the folder, for a pack that comes in."""
        try:
            handle, path = tempfile.mkstemp(f"{SUFFIX}.tmp", f".{name}.upload-", self.folder)
        except OSError as error:
            raise Refusal(507, f"the library cannot be written: {error.strerror}") from error
        os.close(handle)
        return Path(path)

    def adopt(self, name: str, upload: Path, *, force: bool = False) -> bool:
        """Check an upload like any pack, then make it the domain's in one step.

        True if there was none of this name before. The upload is gone afterwards, either way.
        """
        path = self._path(name)
        try:
            entry = Entry(name, upload, (0, 0, 0), inspect(upload))
            self._check_head(entry)
            method = load_domain(upload, self.base).method
            with upload.open("rb") as file:
                os.fsync(file.fileno())
            upload.chmod(0o644)
            with self._alone(path, name):
                check_sources(path, method)  # no other request of this process deletes them now
                if not force and path.is_file() and masks_digest(upload) != digest_or_none(path):
                    self._check_unused(path, name, dependents, "replace")
                created = not path.exists()
                upload.replace(path)
        except Refusal:
            raise
        except PolymaskError as error:
            raise Refusal(422, _without_paths(str(error), upload)) from error
        except OSError as error:
            raise Refusal(507, f"the pack cannot be stored: {error.strerror}") from error
        finally:
            upload.unlink(missing_ok=True)
        return created

    def remove(self, name: str, *, force: bool = False) -> None:
        """Delete a pack and what was kept for it; refused where others draw on its masks, unless that is meant."""
        path = self._path(name)
        try:
            with self._alone(path, name):
                if not force:
                    self._check_unused(path, name, drawing_on, "delete")
                remove_pack(path)
        except FileNotFoundError as error:
            raise no_domain(name) from error
        except OSError as error:
            raise Refusal(507, f"the pack cannot be deleted: {error.strerror}") from error
        self._drop(name)

    def versions(self) -> dict[str, list[int]]:
        """The numbers of the versions that are kept of domains, by name."""
        return kept_versions(self.folder)

    def rollback(self, name: str, to: int | None) -> None:
        """Bring back a version of a domain, in one step; by default the one before."""
        path = self._path(name)
        if not path.is_file():
            raise no_domain(name)
        try:
            with self._changing, _told_of_others(path, name):
                rollback(path, to)
        except Refusal:
            raise
        except PolymaskError as error:
            raise Refusal(409, _without_paths(str(error), path)) from error

    @contextlib.contextmanager
    def _alone(self, path: Path, name: str) -> Iterator[None]:
        """Be the only one that changes a domain; refused while another process does."""
        with self._changing, _told_of_others(path, name), locked(path):
            yield

    def _check_unused(self, path: Path, name: str, users_of: Callable[[Path], list[str]], what: str) -> None:
        try:
            users = users_of(path)
        except OSError:  # gone: nobody can draw on it
            users = []
        except PackUnavailable as error:  # who draws on it is not known
            raise Refusal(503, _without_paths(str(error), path), retry=1) from error
        if users:
            some = ", ".join(users[:5])
            raise Refusal(409, f"{some} draw on the masks of {name}; bake them first, or {what} it with ?force=true")

    def _check_head(self, entry: Entry) -> None:
        """What can be known of a pack without its tensors."""
        manifest = entry.info.manifest
        if manifest.fingerprint != self.base.fingerprint:
            raise PackError(
                f"it was made for base {manifest.base} (fingerprint {manifest.fingerprint[:12]}…), "
                f"this server's is {self.base.name} ({self.base.fingerprint[:12]}…); serve it with "
                "the base that it was trained on"
            )
        if not manifest.classes:
            raise PackError("it has no classes: it gives features, not predictions")
        try:
            spec = entry.input
            short = short_side(spec)
        except (TypeError, OverflowError) as error:
            raise PackError(f"its input makes no sense: {error}") from error
        channels = self.base.input.shape[0]
        if len(spec.shape) != 3 or spec.shape[0] != channels or spec.shape[1] != spec.shape[2]:
            raise PackError(f"its images have shape {spec.shape}; {channels} × N × N is served")
        if short > self.max_side:
            raise PackError(f"it asks for images of {short} pixels; {self.max_side} are allowed")
        weights = sum(site.numel for site in self.base.all_sites.values())
        bits = sum(math.prod(how["shape"]) for how in manifest.bits.values())
        if bits > 4 * weights:  # a few bytes of a file may stand for very many bits
            raise PackError(f"it has {bits:,} mask bits for {weights:,} weights")

    def _path(self, name: str) -> Path:
        try:
            check_name(name)
        except DomainError as error:
            raise no_domain(name) from error
        return self.folder / f"{name}{SUFFIX}"

    def _drop(self, name: str) -> None:
        with self._lock:
            self._rejected.pop(name, None)
            old = self._known.pop(name, None)
        if old is not None:
            self._forget(old.key)


@contextlib.contextmanager
def _told_of_others(path: Path, name: str) -> Iterator[None]:
    """Refuse where another process has the pack, or its files cannot be written."""
    try:
        yield
    except FileBusy as error:
        raise Refusal(409, f"{name} is being changed by another process; try again later", retry=5) from error
    except FileError as error:
        raise Refusal(507, _without_paths(str(error), path)) from error


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _without_paths(message: str, path: Path) -> str:
    """A message for clients: where the server keeps its files is not their business."""
    return message.replace(str(path), "the pack").replace(str(path.parent), "the library")
