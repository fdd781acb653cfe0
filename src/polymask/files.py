"""Files: written whole or not at all, names that may be files, the notes in them, and digests of what they hold."""

import hashlib
import json
import math
import os
import re
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from threading import get_ident
from typing import Any

from polymask import __version__
from polymask.errors import DomainError, FileError, PolymaskError

SUFFIX = ".safetensors"  # of packs, and of bases' files
PACK_KEY = "polymask"  # of a pack's manifest, in the metadata of safetensors
_DIGITS = 19  # of a whole number: what fits in 64 bits
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
