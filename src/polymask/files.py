"""Files: written whole or not at all, names that may be files, the notes in them, and digests of what they hold."""

import glob
import hashlib
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from threading import get_ident
from typing import IO, Any

from polymask import __version__
from polymask.errors import DomainError, FileBusy, FileError, PolymaskError

SUFFIX = ".safetensors"  # of packs, and of bases' files
PACK_KEY = "polymask"  # of a pack's manifest, in the metadata of safetensors
_DIGITS = 19  # of a whole number: what fits in 64 bits
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"  # of a domain


def write_atomically(path: Path, data: bytes) -> None:
    """Write the whole file or nothing: beside it first, then renamed. Makes the folder where there is none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        while (file := _open_alone(temporary)) is None:  # somebody looks whether it was left behind
            pass
        with file:
            file.truncate(0)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):  # the first error is the one to hear of
            temporary.unlink(missing_ok=True)


def _remove_leftovers(path: Path) -> None:
    """Remove what a writer of `path` left beside it when it was killed; not what one is writing now."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.[0-9]*.[0-9]*.tmp"):
        with suppress(OSError):
            if (file := _open_alone(temporary)) is not None:
                with file:
                    temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only process that writes `path` and what belongs to it; raise and say who is, if another does.

    The system gives the lock of a process that dies to the next one, so nobody has to clear it away.
    """
    lock = path.with_name(f".{path.name}.lock")
    made = [folder for folder in lock.parents if not folder.exists()]
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = _open_alone(lock)
        if file is None:
            who = lock.read_text(errors="replace")[:200] or "another process"
            raise FileBusy(f"{path} is being made by {who}; wait until it is done, or choose another name")
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with file:
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"process {os.getpid()} on {platform.node()} since {since}".encode())
            file.flush()
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
    finally:
        for folder in made:  # where nothing was written after all
            with suppress(OSError):
                folder.rmdir()


def _open_alone(path: Path) -> IO[bytes] | None:
    """A file that no other process has open in this way until it is closed; None where one has."""
    while True:
        file = path.open("ab")
        if not _lock(file):
            file.close()
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # it was removed meanwhile


def _lock(file: IO[bytes]) -> bool:
    """Whether an open file could be locked, which lasts until it is closed."""
    if sys.platform == "win32":  # there nobody can remove what is open
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def check_name(name: str) -> None:
    """Raise unless `name` can be a domain's: it becomes a file's name."""
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise DomainError(
            f"{name!r} cannot name a domain; use up to 100 letters, digits, '.', '_' and '-', "
            "beginning with a letter or a digit"
        )


def exemplars_path(pack: Path) -> Path:
    """Where a few images of a pack's domain are kept, if any are."""
    return pack.with_name(f"{pack.name.removesuffix(SUFFIX)}.exemplars")


def json_object(path: str | Path, text: str | bytes, what: str, error: type[PolymaskError]) -> dict[str, Any]:
    """The JSON object that a file has as its `what`: numbers are finite, texts can be written as UTF-8."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    def number(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise ValueError(f"{digits[:20]} is too large")
        return value

    def whole(digits: str) -> int:
        if len(digits.lstrip("-")) > _DIGITS:
            raise ValueError(f"{digits[:20]}… is too large")
        return int(digits)

    try:
        content = json.loads(text, parse_constant=refuse, parse_float=number, parse_int=whole)
        json.dumps(content, ensure_ascii=False).encode("utf-8")  # fails on half a character
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is damaged: its {what} is not JSON ({problem})") from problem
    if not isinstance(content, dict):
        raise error(f"{path} is damaged: its {what} is not a JSON object")
    return content


def check_fields(path: str | Path, content: dict[str, Any], notes: Any, kind: str, error: type[PolymaskError]) -> None:
    """Raise `error` unless `content` has the fields of the dataclass `notes`, in a format that can be read."""
    known = getattr(notes, "formats", (notes.format,))
    if type(content.get("format")) is not int or content["format"] not in known:
        raise error(
            f"{path} has {kind} format {content.get('format')!r}, polymask {__version__} reads "
            f"format {' and '.join(map(str, known))}; use the version that wrote it ({content.get('library')!r})"
        )
    odd = sorted(content.keys() ^ {f.name for f in fields(notes)})
    if odd:
        raise error(f"{path}: its notes lack or do not know {', '.join(map(repr, odd))}")


def digest(*parts: str | bytes) -> str:
    """A sha256 over parts, each preceded by its length so that no two lists look alike."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()
