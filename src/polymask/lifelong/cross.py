"""Domains that draw on others: which ones a new domain draws on, and packs that stand alone again."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from polymask.core.base import Base
from polymask.core.domain import LIKENESS, Domain
from polymask.data.images import DomainData
from polymask.errors import DomainError, MethodError, PackError, near_matches
from polymask.files import SUFFIX
from polymask.methods.affine.cross import masks_of
from polymask.pack.format import inspect, packs_in
from polymask.pack.storing import load_domain
from polymask.train.predict import likeness, read_likeness


def open_sources(text: str, library: Path, base: Base, data: DomainData, *, without: str) -> Mapping[str, Domain]:
    """The domains that NAME,NAME or auto:N stand for in a library; never the one that is being learned."""
    automatic = re.fullmatch(r"auto:([1-9][0-9]?)", text)
    packs = packs_by_name(library, without)
    if automatic is not None:
        return nearest_sources(packs, base, data, int(automatic[1]))
    names = [name.strip() for name in text.split(",") if name.strip()]
    if without in names:
        raise DomainError(f"{without} cannot draw on itself; choose another name for the new domain")
    if not names or len(set(names)) < len(names):
        raise DomainError(f"sources {text!r} must be different names, NAME,NAME, or auto:3")
    return {name: load_domain(pack_of(name, packs, library), base) for name in names}


def nearest_sources(packs: Mapping[str, Path], base: Base, data: DomainData, count: int) -> dict[str, Domain]:
    """The domains with masks whose images look most like these, the likest first."""
    found: dict[str, Domain] = {}
    for name in by_likeness(packs, base, data):
        try:
            domain = load_domain(packs[name], base)
            masks = masks_of(name, domain)
        except (MethodError, PackError):
            continue
        if masks.keys() >= base.sites.keys():
            found[name] = domain
        if len(found) == count:
            break
    if not found:
        raise DomainError("no domain of the library has masks and a likeness to choose it by; name the sources")
    return found


def packs_by_name(library: Path, without: str = "") -> dict[str, Path]:
    """The packs of a library by the names of their domains."""
    packs = {path.name.removesuffix(SUFFIX): path for path in packs_in(library)} if library.is_dir() else {}
    packs.pop(without, None)
    return packs


def pack_of(name: str, packs: Mapping[str, Path], library: Path) -> Path:
    """The pack of a domain; raise where the library has none of this name."""
    if name not in packs:
        known = near_matches(name, packs) if packs else "it has no packs"
        raise DomainError(f"no domain is named {name!r} in {library}; {known}")
    return packs[name]


def by_likeness(packs: Mapping[str, Path], base: Base, data: DomainData) -> list[str]:
    """The packs of this base that say what their images look like, the likest first."""
    own = read_likeness(likeness(base, data.train), base.feature_dim)
    if own is None:
        raise DomainError(f"base {base.name} gives no feature vectors to compare images by; name the sources")
    cosines: dict[str, float] = {}
    for name, path in packs.items():
        try:
            manifest = inspect(path).manifest
        except PackError:
            continue
        theirs = read_likeness(manifest.recipe.get(LIKENESS), base.feature_dim)
        if manifest.fingerprint == base.fingerprint and theirs is not None:
            cosines[name] = float(torch.dot(own, theirs))
    return sorted(cosines, key=lambda name: (-cosines[name], name))


def bake(domain: Domain) -> Domain:
    """A copy of a domain whose pack holds the masks that it draws on, and stands alone; to the same bits."""
    if not domain.method.needs:
        raise MethodError(f"the domain ({domain.method.name}) draws on no other, so it stands alone already")
    baked = domain.frozen()
    domain.method.bake(baked)
    return baked
