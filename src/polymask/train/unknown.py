"""Teach a domain that is there already to tell unknown images: one pass over images of its classes, no training.

What is kept, and how an image is scored by it, is in `core/unknown.py`.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.unknown import BY_DISTANCE, MOST_RANK, RULES, ZERO, Judgement, Rule, Unknown
from polymask.data.batches import Batches, as_batches, parts_of
from polymask.data.images import DomainData, looks_of, same_looks
from polymask.data.load import load_data
from polymask.data.loader import Loader, loader_at
from polymask.errors import DataError, DomainError
from polymask.train.predict import all_labels
from polymask.train.regression import Seen, gathered

VAL_LOOKS = "val_images"  # in a recipe's note: what tells the val that a head has learned from
RULE: Rule = "cosine"  # the best on validation images: docs/unknown.md
WITHOUT_TRAIN: Rule = "softmax"  # the best of those that look at logits alone
RANK = 16  # directions that are kept
ROWS = 1024  # images that are kept as neighbours, in all
FEWEST = 20  # validation images: one of them is beyond a threshold at 95 %
_IMAGES, _OF_CLASS = 2048, 20  # training images that are looked at: so many, or so many of each class
_TEMPERATURES = (0.05, 20.0)
_DIRECTIONS_OF = 2048  # images: more take long, and change nothing
_LARGEST_HALF = 65504.0
_BOUNDS = (-0.9816, 0.0, 0.9816)  # between the four levels of a class mean


@dataclass(frozen=True)
class Observed:
    """What a network made of images whose classes are known."""

    features: Tensor  # (N, size)
    logits: Tensor  # (N, classes)
    labels: Tensor  # (N,)


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
    A domain whose head has learned from the val of these very images (`learned_from_val`) keeps its temperature, which
    was found before that.
    """
    check_calibrates(base, domain)
    if isinstance(data, str | Path):
        data = load_data(data, seed=seed)
    before = domain.judgement if _learned_from_val(domain, data) else None
    train, val = _parts(domain, data)
    temperature = None if before is None else before.temperature
    return calibrate_on(base, domain, train, val, rule=rule, accepted=accepted, rank=rank, temperature=temperature)


def _learned_from_val(domain: Domain, data: Any) -> bool:
    """Whether the head has learned from these very images of val."""
    if not isinstance(data, DomainData) or not domain.metrics.get("learned_from_val"):
        return False
    val = data.with_classes_of(domain.classes or []).val
    return same_looks(domain.recipe.get(VAL_LOOKS), looks_of(val))


def calibrate_on(
    base: Base,
    domain: Domain,
    train: Batches | None,
    val: Batches,
    *,
    rule: Rule | None = None,
    accepted: float = 0.95,
    rank: int = RANK,
    temperature: float | None = None,
) -> Calibration:
    """The same by batches of images as they are fed at test; a `temperature` that is given stays."""
    most = max(_IMAGES, _OF_CLASS * len(domain.classes or []))
    known = None if train is None else observe(base, domain, train, most)
    return _calibrated(base, domain, known, observe(base, domain, val), rule, accepted, rank, temperature)


def calibrate_seen(base: Base, domain: Domain, train: Seen, val: Seen) -> Calibration:
    """The same by features that were gathered before."""
    known, held_out = (_observed(base, domain, seen) for seen in (train, val))
    return _calibrated(base, domain, known, held_out, None, 0.95, RANK)


def _calibrated(
    base: Base,
    domain: Domain,
    known: Observed | None,
    held_out: Observed,
    rule: Rule | None,
    accepted: float,
    rank: int,
    temperature: float | None = None,
) -> Calibration:
    if rule is None:
        rule = WITHOUT_TRAIN if known is None else RULE
    unknown = fit_unknown(rule, known, held_out, accepted=accepted, rank=rank, temperature=temperature)
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
    """Batches of training images as they are fed at test, in a random order, where they can be made so.

    Where not, `observe` takes some of every batch: sets are often sorted by class.
    """
    if isinstance(train, Loader) and isinstance(val, Loader):
        return Loader(train.cache, val.transform, batch_size=val.batch_size, shuffle=True)
    return train


def observe(base: Base, domain: Domain, batches: Batches, most: int | None = None) -> Observed:
    """Features, logits and labels of images, as the network of a domain sees them."""
    return _observed(base, domain, gathered(base, domain, _counted(batches, most)))


@torch.no_grad()
def _observed(base: Base, domain: Domain, seen: Seen) -> Observed:
    pieces = torch.split(seen.features, 1024)
    logits = torch.cat([domain.classify(some.to(base.device)).float().cpu() for some in pieces])
    return Observed(seen.features.cpu(), logits, seen.labels.cpu())


def _counted(batches: Batches, most: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches with about `most` images: the first ones of a random order, and of any other some of every batch."""
    drawn, seen = isinstance(batches, Loader) and batches.shuffle, 0
    each = None if most is None or drawn else max(1, math.ceil(most / len(batches)))
    for images, labels in batches.batches():
        yield images[:each], labels[:each]
        seen += len(labels)
        if drawn and most is not None and seen >= most:
            return


def _parts(domain: Domain, data: Any) -> tuple[Batches | None, Batches]:
    if isinstance(data, DomainData):
        data = data.with_classes_of(domain.classes or [])
        held_out = loader_at(data.val, domain.input)
        return evenly(loader_at(data.train, domain.input), held_out), held_out
    parts = parts_of(data)
    if "val" not in parts:
        raise DataError("there is no val to set a threshold by; give train and val, or a folder that can be split")
    train, val = (
        as_batches(parts[role], domain.input, domain.classes) if role in parts else None for role in ("train", "val")
    )
    assert val is not None
    return None if train is None else evenly(train, val), val


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


def fit_unknown(
    rule: Rule,
    train: Observed | None,
    val: Observed,
    *,
    accepted: float = 0.95,
    rank: int = RANK,
    temperature: float | None = None,
) -> Unknown:
    """The rule for a domain: its tensors from training images, its temperature and threshold from validation images.

    A rule that looks at logits alone keeps the class means too, where there are training images.
    """
    if rule not in RULES:
        raise DomainError(f"rule {rule!r} is not known; take one of {', '.join(RULES)}")
    if not 0 < accepted < 1 or not 1 <= rank <= MOST_RANK:
        raise DomainError(f"accepted={accepted} must be between 0 and 1, rank={rank} from 1 to {MOST_RANK}")
    if len(val.labels) < FEWEST:
        raise DataError(
            f"{len(val.labels)} validation images are too few to set a threshold by; give {FEWEST} at least"
        )
    if temperature is None:
        temperature = fit_temperature(val.logits, val.labels)
    judgement = Judgement(rule, temperature, 0.0, accepted)
    enough = train if train is not None and len(train.labels) >= 2 else None
    if judgement.looks_at_features and enough is None:
        raise DataError(f"{rule} needs training images, two at least; give some, or take softmax or energy")
    tensors = {} if enough is None else _statistics(rule, enough, rank)
    judgement = replace(judgement, means=bool(tensors) and not judgement.looks_at_features)
    scores = Unknown(judgement, tensors).score(val.features, val.logits)
    beyond = int(len(scores) * (1 - accepted) + 1e-9)
    return Unknown(replace(judgement, threshold=float(scores.sort().values[beyond])), tensors)


def extend_unknown(unknown: Unknown, train: Observed, val: Observed, classes: int) -> Unknown:
    """A rule with the classes of more images, numbered from `classes` on, whose share is accepted too."""
    tensors, judgement = dict(unknown.named_buffers()), unknown.judgement
    if judgement.has_tensors:
        features = train.features.to(unknown.device)
        new = train.labels.to(unknown.device) - classes
        count = int(new.max()) + 1
        if "codes" in tensors:
            more = _coded(_means(features.double() - unknown.mean.double(), new, count))
            tensors |= {name: torch.cat([tensors[name], tensor]) for name, tensor in more.items()}
        else:
            y, _ = unknown.places(features)
            y = y[_spaced(new, count)] if judgement.rule == "neighbours" else _means(y, new, count)
            tensors["rows"] = torch.cat([unknown.rows, _halved(y)])
    wider = Unknown(judgement, tensors)
    scores = wider.score(val.features.to(unknown.device), val.logits.to(unknown.device)).sort().values
    reached = float(scores[int(len(scores) * (1 - judgement.accepted) + 1e-9)])
    return Unknown(replace(judgement, threshold=min(judgement.threshold, reached)), tensors)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """T with the least mean of -log softmax(z / T) of the labels: convex in 1 / T, so thirds of its range find it."""
    logits = logits.double()
    low, high = (math.log(end) for end in _TEMPERATURES)
    for _ in range(60):
        one, other = low + (high - low) / 3, high - (high - low) / 3
        if F.cross_entropy(logits / math.exp(one), labels) < F.cross_entropy(logits / math.exp(other), labels):
            high = other
        else:
            low = one
    return round(math.exp((low + high) / 2), 6)


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """The expected calibration error in percent: |accuracy - confidence| by bins of confidence, by images."""
    confidence, guess = probabilities.double().max(1)
    right = (guess == labels).double()
    place = (confidence * bins).ceil().long().clamp(1, bins)
    gaps = [(right[place == b].sum() - confidence[place == b].sum()).abs() for b in range(1, bins + 1)]
    return 100 * float(cast(Tensor, sum(gaps))) / len(labels)


def _statistics(rule: Rule, train: Observed, rank: int) -> dict[str, Tensor]:
    features, labels = train.features.double(), train.labels
    classes = train.logits.shape[1]
    if not torch.isfinite(features).all():
        raise DataError("the features of training images are not finite; train the domain again with a smaller rate")
    mean = _halved(features.mean(0))
    away = features - mean.double()
    own = _means(away, labels, classes)
    rank = min(rank, features.shape[1], len(features) - 1)
    directions = _directions((away if rule in BY_DISTANCE else away - own[labels])[:_DIRECTIONS_OF], rank)
    scale = (directions.abs().amax(0).clamp_min(1e-12) / (ZERO - 1)).float()
    basis = ((directions / scale).round() + ZERO).clamp(0, 255).to(torch.uint8)
    B = (basis.double() - ZERO) * scale
    within = (away - own[labels]) @ B
    covariance = within.T @ within / len(within)
    ridge = 1e-3 * covariance.diagonal().mean().clamp_min(1e-12)
    covariance += ridge * torch.eye(rank, dtype=B.dtype, device=B.device)
    values, vectors = torch.linalg.eigh(covariance)
    whiten = vectors / values.clamp_min(float(ridge)).sqrt()
    kept = {"basis": basis, "scale": scale, "mean": mean, "whiten": whiten.float()}
    if rule not in BY_DISTANCE:
        return kept | _coded(own)
    p = away @ B
    q = away.square().sum(1) - p.square().sum(1)
    spread = q.std(correction=0)
    weight = 1 / spread if spread > 0 else spread
    rows = (p @ whiten)[_spaced(labels, classes)] if rule == "neighbours" else own @ B @ whiten
    return kept | {"rows": _halved(rows), "rest": torch.stack([q.mean(), weight]).float().clamp(-1e12, 1e12)}


def _means(values: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The mean of each class's rows (classes, size); 0 where it has none."""
    sums = values.new_zeros(classes, values.shape[1]).index_add_(0, labels, values)
    return sums / torch.bincount(labels, minlength=classes).clamp_min(1)[:, None]


def _coded(means: Tensor) -> dict[str, Tensor]:
    """What stands for rows (classes, features) around 0: a size for each, and for each entry the nearest level."""
    sizes = means.square().mean(1).sqrt().clamp_max(1e12).float()
    bounds = torch.tensor(_BOUNDS, dtype=means.dtype, device=means.device)
    places = torch.bucketize(means / sizes.double().clamp_min(1e-30)[:, None], bounds)
    quarters = F.pad(places, (0, -places.shape[1] % 4)).to(torch.uint8).view(len(places), -1, 4)
    codes = quarters[..., 0] | quarters[..., 1] << 2 | quarters[..., 2] << 4 | quarters[..., 3] << 6
    return {"codes": codes, "sizes": sizes}


def _halved(values: Tensor) -> Tensor:
    return values.clamp(-_LARGEST_HALF, _LARGEST_HALF).half()


def _directions(away: Tensor, rank: int) -> Tensor:
    """The first right singular vectors (features, rank), by way of the smaller of the two squares."""
    if len(away) > away.shape[1]:
        vectors: Tensor = torch.linalg.eigh(away.T @ away)[1]
        return vectors[:, -rank:]
    values, left = torch.linalg.eigh(away @ away.T)
    scaled: Tensor = left[:, -rank:] / values[-rank:].clamp_min(1e-12).sqrt()
    return away.T @ scaled


def _spaced(labels: Tensor, classes: int) -> Tensor:
    """Places of images to keep: equally many of each class, ROWS in all."""
    each = max(1, ROWS // classes)
    return torch.cat([(labels == label).nonzero().view(-1)[:each] for label in range(classes)])
