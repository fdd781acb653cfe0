"""Files: written whole or not at all, names that may be files, and digests of what they hold."""

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from threading import get_ident

from polymask.errors import DomainError, FileError

SUFFIX = ".safetensors"  # of packs, and of bases' files
PACK_KEY = "polymask"  # of a pack's manifest, in the metadata of safetensors
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"  # of a domain


def write_atomically(path: Path, data: bytes) -> None:
    """Write the whole file or nothing: beside it first, then renamed. Makes the folder where there is none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):  # the first error is the one to hear of
            temporary.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Remove what a writer of `path` left beside it when it was killed."""
    for temporary in path.parent.glob(f".{path.name}.*.tmp"):
        temporary.unlink(missing_ok=True)


def check_name(name: str) -> None:
    """Raise unless `name` can be a domain's: it becomes a file's name."""
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise DomainError(
            f"{name!r} cannot name a domain; use up to 100 letters, digits, '.', '_' and '-', "
            "beginning with a letter or a digit"
        )


def digest(*parts: str | bytes) -> str:
    """A sha256 over parts, each preceded by its length so that no two lists look alike."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()
