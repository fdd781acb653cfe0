"""Teach a domain that is there already to tell unknown images: one pass over images of its classes, no training."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.unknown import FEWEST, RANK, Observed, Rule, Unknown, calibration_error, fit_unknown
from polymask.data.batches import Batches, as_batches, parts_of
from polymask.data.images import DomainData, some
from polymask.data.load import load_data
from polymask.data.loader import Loader
from polymask.errors import DataError, DomainError
from polymask.train.finishing import gathered, loader_at
from polymask.train.predict import all_labels

RULE: Rule = "cosine"  # the best on validation images: docs/unknown.md
WITHOUT_TRAIN: Rule = "softmax"  # the best of those that look at logits alone
_IMAGES, _OF_CLASS = 2048, 20  # training images that are looked at: so many, or so many of each class


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found, on the validation images: shares and errors in percent."""

    rule: Rule
    temperature: float
    threshold: float
    accepted: float  # of the validation images
    error_before: float  # expected calibration error of the probabilities
    error_after: float  # at the temperature
    images: int  # of validation
    bytes: int  # that the pack grows by, without its manifest

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def calibrate(
    base: Base,
    domain: Domain,
    data: Any,
    *,
    rule: Rule | None = None,
    accepted: float = 0.95,
    rank: int = RANK,
    seed: int = 0,
) -> Calibration:
    """Give a domain what it needs to say "unknown", and probabilities that fit; nothing else of it changes.

    `data` has images of the domain's classes, as `learn` takes them: train and val. Train gives the class
    means, which softmax and energy do without, val the temperature and the threshold: `accepted` of its images stay
    known. Without a `rule` it is the best one that the images allow: cosine, or softmax where there is no train.
    """
    check_calibrates(base, domain)
    train, val = _parts(domain, data, seed)
    return calibrate_on(base, domain, train, val, rule=rule, accepted=accepted, rank=rank)


def calibrate_on(
    base: Base,
    domain: Domain,
    train: Batches | None,
    val: Batches,
    *,
    rule: Rule | None = None,
    accepted: float = 0.95,
    rank: int = RANK,
) -> Calibration:
    """The same by batches of images as they are fed at test."""
    most = max(_IMAGES, _OF_CLASS * len(domain.classes or []))
    known = None if train is None else observe(base, domain, train, most)
    held_out = observe(base, domain, val)
    if rule is None:
        rule = WITHOUT_TRAIN if known is None else RULE
    unknown = fit_unknown(rule, known, held_out, accepted=accepted, rank=rank)
    report = _report(unknown, held_out)
    domain.unknown = unknown.to(base.device)
    return report


def check_calibrates(base: Base, domain: Domain) -> None:
    """Raise unless a domain has classes, and features to look at."""
    if domain.classes is None or domain.target.kind != "classes":
        raise DomainError(f"a domain of {domain.target.kind} gives no class that could be unknown; give one of classes")
    if base.feature_dim is None:
        raise DomainError(f"base {base.name} does not give one feature vector an image; unknown images cannot be told")


def can_calibrate(base: Base, domain: Domain, val: Batches) -> bool:
    """Whether a domain that was just learned can be calibrated: classes, features, enough validation images."""
    if domain.classes is None or domain.target.kind != "classes" or base.feature_dim is None:
        return False
    return len(all_labels(val)) >= FEWEST


def evenly(train: Batches, val: Batches) -> Batches:
    """Batches of training images as they are fed at test, in a random order, where they can be made so."""
    if isinstance(train, Loader) and isinstance(val, Loader):
        return Loader(train.cache, val.transform, batch_size=val.batch_size, shuffle=True)
    return train


@torch.no_grad()
def observe(base: Base, domain: Domain, batches: Batches, most: int | None = None) -> Observed:
    """Features, logits and labels of images, as the network of a domain sees them."""
    features, labels = (part.cpu() for part in gathered(base, domain, _counted(batches, most)))
    logits = torch.cat([domain.classify(some.to(base.device)).float().cpu() for some in torch.split(features, 1024)])
    return Observed(features, logits, labels)


def _counted(batches: Batches, most: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    seen = 0
    for images, labels in batches.batches():
        yield images, labels
        seen += len(labels)
        if most is not None and seen >= most:
            return


def _parts(domain: Domain, data: Any, seed: int) -> tuple[Batches | None, Batches]:
    if isinstance(data, str | Path):
        data = load_data(data, seed=seed)
    if isinstance(data, DomainData):
        if list(data.classes) != domain.classes:
            raise DomainError(
                f"the classes of {data.name} ({some(list(data.classes), 4)}) are not those of the domain "
                f"({some(domain.classes or [], 4)}); give images of the same classes"
            )
        held_out = loader_at(data, data.val, domain.input)
        return evenly(loader_at(data, data.train, domain.input), held_out), held_out
    parts = parts_of(data)
    if "val" not in parts:
        raise DataError("there is no val to set a threshold by; give train and val, or a folder that can be split")
    train, val = (
        as_batches(parts[role], domain.input, domain.classes) if role in parts else None for role in ("train", "val")
    )
    assert val is not None
    return train, val


def _report(unknown: Unknown, val: Observed) -> Calibration:
    judgement = unknown.judgement
    errors = [
        calibration_error((val.logits / temperature).softmax(1), val.labels)
        for temperature in (1.0, judgement.temperature)
    ]
    accepted = float((unknown.score(val.features, val.logits) >= judgement.threshold).double().mean())
    return Calibration(
        rule=judgement.rule,
        temperature=judgement.temperature,
        threshold=judgement.threshold,
        accepted=100 * accepted,
        error_before=errors[0],
        error_after=errors[1],
        images=len(val.labels),
        bytes=unknown.bytes,
    )
