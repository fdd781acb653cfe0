"""Packs that other packs draw on: found by name and by the digest of their masks, in the same folder.

A source may be calibrated, or get classes by its head, and stays the same source: its masks do. Where its masks have
changed, the version that was kept before has them. Masks are kept in memory once for all that draw on them.
"""

import weakref
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from polymask.core.bits import Bits, digest_bits
from polymask.core.method import Method
from polymask.core.parts import Stored
from polymask.errors import PackError, PackUnavailable
from polymask.files import SUFFIX
from polymask.pack.codec import BitArray
from polymask.pack.format import Manifest, inspect, packs_in, read_pack

_IN_MEMORY: "dict[str, dict[str, tuple[weakref.ref[Tensor], tuple[int, ...]]]]" = {}  # by digest


class MissingSource(PackUnavailable):
    """A pack draws on another that is not there; it may come back."""


def masks_in(path: Path) -> dict[str, Bits]:
    """The masks of a pack, by site."""
    found = {}
    for name, tensor in read_pack(path)[1].items():
        if isinstance(tensor, BitArray) and name.startswith("transform/") and name.endswith("/mask"):
            try:
                found[name.split("/")[1]] = Bits.from_bytes(tensor.decoded(), tensor.shape)
            except ValueError as error:
                raise PackError(f"{path}: {name}: {error}") from error
    return found


def masks_digest(path: Path) -> str:
    """The digest of a pack's masks; a file that did not change is read once."""
    stat = path.stat()
    return _digest(path, (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=1024)
def _digest(path: Path, stamp: tuple[int, int, int]) -> str:
    return digest_bits(masks_in(path))


def find_source(folder: Path, name: str, digest: str) -> Path:
    """The pack of a source, or the version of it that has these masks; MissingSource says what is not there."""
    there = f"there is no {name}{SUFFIX} in {folder}"
    for path in (folder / f"{name}{SUFFIX}", *sorted(folder.glob(f"{name}@*.version"))):
        if not path.is_file():
            continue
        try:
            found = masks_digest(path)
        except PackError as error:
            there = str(error)
            continue
        if found == digest:
            return path
        there = f"{name}{SUFFIX} there has other masks"
    raise MissingSource(
        f"it draws on the masks of {name} (digest {digest[:12]}…), and {there}; copy the pack that it was learned with "
        "beside it, or get one that stands alone (polymask bake)"
    )


def read_sources(path: Path, method: Method, sites: Mapping[str, tuple[int, ...]]) -> dict[str, Stored]:
    """The masks of a pack's sources, under the names that its domain has for them."""
    stored: dict[str, Stored] = {}
    for place, (name, digest) in enumerate(method.needs):
        try:
            masks = _masks(find_source(path.parent, name, digest), digest)
        except MissingSource as error:
            raise MissingSource(f"{path}: {error}") from error
        for site, shape in sites.items():
            if site not in masks or masks[site].shape != tuple(shape):
                raise PackError(f"{path}: its source {name} has no mask for {site} on this base; copy both packs again")
            stored[f"transform/{site}/source{place}"] = masks[site]
    return stored


def check_sources(path: Path, method: Method) -> None:
    """Raise unless what a pack draws on is where it is going to be."""
    for name, digest in method.needs:
        if path.name == f"{name}{SUFFIX}":
            raise PackError(
                f"{path} is not written: a domain cannot draw on the one that it replaces; choose another name"
            )
        try:
            find_source(path.parent, name, digest)
        except MissingSource as error:
            raise MissingSource(f"{path} is not written: {error}") from error


def needs_of(manifest: Manifest) -> list[tuple[str, str]]:
    """(name, digest of masks) of what a pack draws on, as its manifest says, not checked."""
    texts = manifest.options.get("sources")
    if manifest.options.get("baked") or not isinstance(texts, list):
        return []
    parts = [text.rpartition(":") for text in texts if isinstance(text, str)]
    return [(name, digest) for name, _, digest in parts]


def dependents(path: Path) -> list[str]:
    """The names of the packs beside `path` that draw on its masks and would find them nowhere else.

    None do on one that is damaged: its masks are lost to them already.
    """
    users = _users(path)
    if not users or not path.is_file():
        return []
    mine = digest_or_none(path)
    kept = set(map(digest_or_none, _versions(path)))
    return sorted({other for other, digest in users if digest == mine and mine not in kept})


def drawing_on(path: Path) -> list[str]:
    """The names of the packs beside `path` that draw on its masks, or on those of a version of it that is kept."""
    users = _users(path)
    if not users or not path.is_file():
        return []
    there = set(map(digest_or_none, (path, *_versions(path))))
    return sorted({other for other, digest in users if digest in there})


def digest_or_none(path: Path) -> str | None:
    """The digest of a pack's masks; None where it is damaged, not where it cannot be read for now."""
    try:
        return masks_digest(path)
    except PackUnavailable:
        raise
    except PackError:
        return None


def _users(path: Path) -> list[tuple[str, str]]:
    """(name, digest of masks) of the packs beside `path` that name it as a source."""
    name = path.name.removesuffix(SUFFIX)
    return [
        (other.name.removesuffix(SUFFIX), digest)
        for other in packs_in(path.parent)
        for digest in _drawn_from(other, name)
    ]


def _versions(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name.removesuffix(SUFFIX)}@*.version"))


def _drawn_from(path: Path, name: str) -> Iterator[str]:
    try:
        needs = needs_of(inspect(path).manifest)
    except PackError:
        return
    yield from (digest for source, digest in needs if source == name)


def _masks(path: Path, digest: str) -> Mapping[str, Bits]:
    known = _IN_MEMORY.get(digest, {})
    found = {site: Bits(words, shape) for site, (there, shape) in known.items() if (words := there()) is not None}
    if found and len(found) == len(known):
        return found
    masks = masks_in(path)
    _IN_MEMORY[digest] = {site: (weakref.ref(mask.words), mask.shape) for site, mask in masks.items()}
    return masks
