"""Versions of a pack: what a domain was before it changed stays beside it, and can be brought back.

    NAME.safetensors    the domain
    NAME@1.version      what it was first; a pack like any other, never changed again
    NAME@2.version      …

A version is known by its sha256, so the same pack has one number. Servers and libraries look at packs only; a name
with @N finds a version wherever a domain's name is taken.
"""

import re
from contextlib import suppress
from pathlib import Path

from polymask.errors import DomainError, PackError
from polymask.files import NAME, SUFFIX, locked, write_atomically
from polymask.pack.format import inspect, read_pack

_VERSION = ".version"
_NAMED = re.compile(rf"({NAME})@([1-9][0-9]{{0,5}})")


def version_path(path: Path, number: int) -> Path:
    """Where a version of a pack is."""
    return path.with_name(f"{path.name.removesuffix(SUFFIX)}@{number}{_VERSION}")


def find_version(library: Path, name: str) -> Path | None:
    """The file of NAME@N in a library; None where the text is not such a name."""
    match = _NAMED.fullmatch(name)
    if match is None:
        return None
    path = version_path(library / f"{match[1]}{SUFFIX}", int(match[2]))
    if not path.is_file():
        raise DomainError(_missing(library / f"{match[1]}{SUFFIX}", int(match[2])))
    return path


def kept_versions(folder: Path) -> dict[str, list[int]]:
    """The numbers of the versions that are kept in a folder, by the domain's name."""
    found: dict[str, list[int]] = {}
    for file in folder.glob("*@*" + _VERSION):
        if (match := _NAMED.fullmatch(file.name.removesuffix(_VERSION))) is not None:
            found.setdefault(match[1], []).append(int(match[2]))
    return {name: sorted(numbers) for name, numbers in found.items()}


def versions_of(path: Path) -> dict[int, str]:
    """The sha256 of each kept version of a pack, by number; those that cannot be read are left out."""
    found = {}
    for number in kept_versions(path.parent).get(path.name.removesuffix(SUFFIX), []):
        with suppress(PackError):
            found[number] = inspect(version_path(path, number)).manifest.sha256
    return found


def current_version(path: Path) -> int:
    """The number of a pack as it is now: that of the version that it equals, or the next."""
    kept, sha256 = versions_of(path), inspect(path).manifest.sha256
    same = [number for number, digest in kept.items() if digest == sha256]
    return same[0] if same else _next(path)


def keep_version(path: Path) -> int:
    """Keep a pack as it is now under its number, unless it is kept already."""
    number = current_version(path)
    kept = version_path(path, number)
    if not kept.exists():
        read_pack(path)  # a damaged one is not worth keeping, and says so
        write_atomically(kept, path.read_bytes())
    return number


def rollback(path: Path, to: int | None = None) -> tuple[int, int]:
    """Bring back a version of a pack, by default the one before; (the number it had, the number it has).

    What it is now is kept first, so `to` also goes forward again. The pack is replaced in one step.
    """
    with locked(path):
        if not path.is_file():
            raise DomainError(f"there is no pack {path} to roll back")
        now = current_version(path)
        earlier = [number for number in versions_of(path) if number < now]
        if to is None and not earlier:
            raise DomainError(
                f"{path} has no version before this one; only extend, calibrate and rollback keep versions"
            )
        number = earlier[-1] if to is None else to
        wanted = version_path(path, number)
        if not wanted.is_file():
            raise DomainError(_missing(path, number))
        read_pack(wanted)
        keep_version(path)
        write_atomically(path, wanted.read_bytes())
    return now, number


def _next(path: Path) -> int:
    """The number after all that files have, readable or not; those before may have been deleted."""
    return max(kept_versions(path.parent).get(path.name.removesuffix(SUFFIX), []), default=0) + 1


def _missing(path: Path, number: int) -> str:
    kept = ", ".join(map(str, versions_of(path))) or "none"
    return f"{path.name.removesuffix(SUFFIX)} has no version {number} in {path.parent}; kept are {kept}"
