"""Domains that begin as another one, in place of as the base: which one that is.

A domain of the same kind of images has features that the base lacks; one of other images has lost some that the base
has. Of several domains the one is tried whose features are the best for a head alone, on val. Whether a training that
begins there ends ahead of one that begins at the base, no head alone tells: `learn(or_base=True)` does both.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polymask.core.base import Base
from polymask.core.domain import START, Domain
from polymask.core.input import InputSpec
from polymask.core.method import Method
from polymask.core.registry import new_domain
from polymask.core.starting import begin_as, start_note
from polymask.data.images import DomainData, require_classes
from polymask.data.loader import loader_at
from polymask.data.split import Split, SubsetSplit
from polymask.errors import DomainError, MethodError, PackError
from polymask.lifelong.cross import by_likeness, pack_of, packs_by_name
from polymask.pack.storing import load_domain
from polymask.train.regression import STRENGTHS, fit_features, gathered

AUTO = "auto"
TRIED = 3  # domains, the likest
IMAGES = 2000  # of train, and of val, that are looked at


class Start(NamedTuple):
    """What a domain begins as, and what a head alone reaches on val by each that was tried."""

    name: str
    domain: Domain
    reached: Mapping[str, float]

    @property
    def note(self) -> dict[str, Any]:
        """What a domain that begins so will note of it."""
        return start_note(self.domain)

    @property
    def text(self) -> str:
        """What is said of it."""
        if not self.reached:
            return f"begins as {self.name}"
        found = ", ".join(f"{name} {value:.1f} %" for name, value in self.reached.items())
        return f"begins as the base and as {self.name}, and what is better on val is kept (a head alone there: {found})"

    def kept_text(self, learned: Domain) -> str:
        """What is said of a domain that learned from both beginnings."""
        of_base, of_start = learned.metrics["val_by_start"].values()
        better = self.name if START in learned.recipe else "the base"
        return f"what began as {better} is kept: on val {of_base:.2f} % from the base, {of_start:.2f} % otherwise"


def open_start(
    text: str,
    library: Path,
    base: Base,
    data: DomainData,
    method: Method,
    spec: InputSpec,
    sources: Mapping[str, Domain],
    *,
    without: str,
) -> Start:
    """What NAME, or auto, says that a new domain by `method` begins as, fed with images of `spec`.

    A method that draws on others begins as one of these. Any other domain may begin as what it was itself before.
    """
    if text == AUTO:
        return choose_start(sources or _likest(library, base, data, method, without), base, data, spec)
    if sources and text not in sources:
        raise DomainError(f"{method.name} begins as a domain that it draws on; name {text} among --from too")
    domain = sources[text] if sources else load_domain(pack_of(text, packs_by_name(library), library), base)
    return Start(text, domain, {})


def choose_start(candidates: Mapping[str, Domain], base: Base, data: DomainData, spec: InputSpec) -> Start:
    """The one of these whose features are the best for the images, by a head alone on val; of equals the first."""
    require_classes(data, "beginning as the best of several domains")
    parts = [_some(split) for split in (data.train, data.val)]
    reached: dict[str, float] = {}
    for name, domain in candidates.items():
        head = new_domain(base, "classifier-only", data.classes, target=data.target).to(base.device)
        train, val = (gathered(base, domain.to(base.device), loader_at(s, spec).batches()) for s in parts)
        reached[name] = fit_features(head, train, val, STRENGTHS).record.val_accuracy or 0.0
    best = max(reached, key=lambda name: reached[name])
    return Start(best, candidates[best], reached)


def _some(split: Split) -> Split:
    """Of many images some, evenly spread: they may be sorted by class."""
    if len(split) <= IMAGES:
        return split
    return SubsetSplit(split, np.linspace(0, len(split) - 1, IMAGES).astype(int))


def _likest(library: Path, base: Base, data: DomainData, method: Method, without: str) -> dict[str, Domain]:
    """The domains of a library whose images look most alike, of those that one by `method` can begin as."""
    packs = packs_by_name(library, without)
    found: dict[str, Domain] = {}
    for name in by_likeness(packs, base, data):
        try:
            domain = load_domain(packs[name], base)
            begin_as(new_domain(base, method.first_stage(), data.classes), domain, rate=1.0)
        except (MethodError, PackError):
            continue
        found[name] = domain
        if len(found) == TRIED:
            break
    if not found:
        raise DomainError(
            f"no domain of {library} has a likeness and is one that {method.name} can begin as; name one, or leave "
            "--start out"
        )
    return found
