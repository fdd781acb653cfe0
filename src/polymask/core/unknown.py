"""What a domain keeps to tell images of something that it never learned: a score, and a threshold for it.

Of an image with features f and logits z, by one of five rules:

    cosine       s = sum_c softmax(z / T)_c cos(f, μ_c)
    softmax      s = max_c softmax(z / T)_c
    energy       s = T log sum_c exp(z_c / T)
    mahalanobis  s = -(min_c |y - u_c|² + ((q - e) w)²)
    neighbours   s = -(|y - the third nearest of kept images|² + ((q - e) w)²)

    p = Bᵀ(f - m),  y = Lᵀp,  q = |f - m|² - |p|²

μ_c is the mean of a class's features, so `cosine` is how far the features point where those of the class do that the
head believes in. An image of something else is told by its direction, whatever its length, and one between two classes
by its probabilities. μ_c = m + a_c l, with a size a_c for each class and one of four levels l for each feature.

B (features, rank) are the main directions of the training images' features, m their mean. L makes the spread of images
around their class's mean in p the same in all directions, so |y - u_c| is the Mahalanobis distance in B from the mean
u_c of a class. q is what B leaves out, e its mean over training images and 1 / w its deviation: blank images leave out
much less than others, which is as odd as much more. An image is unknown where s is below the threshold, which is set so
that a share of the validation images is accepted. T is the temperature at which probabilities fit validation images
best.

What draws features around a class (`imagined`) is kept with the first three rules: m, a_c and l, and with B of the
spread within classes alone.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymask.core.parts import BlockLinear, Part
from polymask.errors import DataError, DomainError

Rule = Literal["cosine", "softmax", "energy", "mahalanobis", "neighbours"]
RULES: tuple[Rule, ...] = get_args(Rule)
RANK = 16  # directions that are kept
ROWS = 1024  # images that are kept as neighbours, in all
_MOST_RANK, _MOST_ROWS = 64, 1 << 16  # that a pack may have
_NEIGHBOUR = 3  # which one counts
_TEMPERATURES = (0.05, 20.0)
_DIRECTIONS_OF = 2048  # images: more take long, and change nothing
_LARGEST_HALF = 65504.0
_ZERO = 128  # the byte that stands for 0 in B
_LEVELS, _BOUNDS = (-1.51, -0.4528, 0.4528, 1.51), (-0.9816, 0.0, 0.9816)  # the best four for a normal distribution
_BY_DISTANCE = ("mahalanobis", "neighbours")  # rules that keep rows in B, and what B leaves out
FEWEST = 20  # validation images: one of them is beyond a threshold at 95 %


@dataclass(frozen=True)
class Judgement:
    """How scores are judged: what a pack's manifest says, which is known before its tensors are read."""

    rule: Rule
    temperature: float
    threshold: float
    accepted: float  # the share of validation images that the threshold accepts
    means: bool = False  # whether class means are kept that the rule does not look at: `extend` does

    def __post_init__(self) -> None:
        numbers = (self.temperature, self.threshold, self.accepted)
        if self.rule not in RULES or not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
            raise DomainError(f"the note on unknown images needs a rule of {', '.join(RULES)}, and three numbers")
        if not 0 < self.accepted < 1 or not 1e-6 < self.temperature < 1e6:
            raise DomainError("the note on unknown images needs a share from 0 to 1 and a positive temperature")
        if type(self.means) is not bool or (self.means and self.looks_at_features):
            raise DomainError("the note on unknown images may say means: true, for rules that do without them")

    @property
    def looks_at_features(self) -> bool:
        """Whether the rule needs more than logits."""
        return self.rule in ("cosine", *_BY_DISTANCE)

    @property
    def has_tensors(self) -> bool:
        """Whether something is kept of the training images' features."""
        return self.means or self.looks_at_features

    def is_unknown(self, score: float) -> bool:
        """Whether a score is that of something the domain never learned; so is one that is no number."""
        return not score >= self.threshold

    def note(self) -> dict[str, Any]:
        """As a pack's manifest has it."""
        return {name: value for name, value in asdict(self).items() if name != "means" or value}


def read_judgement(note: Any) -> Judgement | None:
    """What a pack's note says; None where it has none, DomainError where it makes no sense."""
    if note is None:
        return None
    if not isinstance(note, dict) or {*note, "means"} != Judgement.__dataclass_fields__.keys():
        raise DomainError(f"the note on unknown images ({str(note)[:60]}) is not one of this version")
    return Judgement(**note)


class Unknown(Part):
    """A domain's rule, with what it needs of the training images' features; buffers, nothing that learns."""

    basis: Tensor  # B as bytes (features, rank)
    scale: Tensor  # (rank,): B = (basis - 128) scale
    mean: Tensor  # (features,)
    whiten: Tensor  # L (rank, rank)
    codes: Tensor  # l of the class means, four in a byte, the first in its lowest bits (classes, features / 4)
    sizes: Tensor  # a (classes,)
    rows: Tensor  # in place of codes and sizes: u (classes, rank), or kept images
    rest: Tensor  # with rows: e and w (2,)

    def __init__(self, judgement: Judgement, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.judgement = judgement
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @property
    def bytes(self) -> int:
        """What its tensors take in a pack."""
        return sum(tensor.nbytes for tensor in self.buffers())

    def score(self, features: Tensor, logits: Tensor) -> Tensor:
        """S (N,) of features (N, size) and logits (N, classes), in float32."""
        rule, temperature = self.judgement.rule, self.judgement.temperature
        if rule == "softmax":
            return (logits.float() / temperature).softmax(1).amax(1)
        if rule == "energy":
            return temperature * (logits.float() / temperature).logsumexp(1)
        if rule == "cosine":
            cosines = F.normalize(features.float(), dim=1) @ F.normalize(self.class_means(), dim=1).T
            return ((logits.float() / temperature).softmax(1) * cosines).sum(1)
        y, q = self.places(features)
        squares = torch.cdist(y, self.rows.float(), compute_mode="donot_use_mm_for_euclid_dist").square()
        nearest = min(_NEIGHBOUR, squares.shape[1]) if rule == "neighbours" else 1
        usual, weight = self.rest.unbind()
        apart: Tensor = squares.kthvalue(nearest, 1).values
        return -(apart + ((q - usual) * weight).square())

    def imagined(self, each: int, draw: torch.Generator) -> Tensor | None:
        """Features (rows, each, size) as they may be around what is kept of each class; None where nothing is.

        f = μ_c + B L⁻ᵀ ε,  ε of variance 1;   with rows  f = m + B L⁻ᵀ(u + ε)
        """
        if not self.judgement.has_tensors:
            return None
        coded = "codes" in self._buffers
        count, rank = len(self.codes if coded else self.rows), len(self.scale)
        y = torch.randn(count, each, rank, generator=draw, dtype=torch.float64)
        middle = self.class_means() if coded else self.mean
        if not coded:
            y += self.rows.double().cpu()[:, None]
        basis = (self.basis.double() - _ZERO).cpu() * self.scale.double().cpu()
        p: Tensor = y @ torch.linalg.inv(self.whiten.double().cpu())
        return (middle.double().cpu().view(-1, 1, basis.shape[0]) + p @ basis.T).float()

    def class_means(self) -> Tensor:
        """μ (classes, features), in float32."""
        levels = torch.tensor(_LEVELS, device=self.codes.device)
        places = torch.stack([self.codes >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)[:, : len(self.mean)]
        return self.mean.float() + self.sizes.float()[:, None] * levels[places.int()]

    def extended(self, train: "Observed", val: "Observed", classes: int) -> "Unknown":
        """The rule with the classes of more images, numbered from `classes` on, whose share is accepted too."""
        tensors = dict(self.named_buffers())
        if self.judgement.has_tensors:
            features = train.features.to(self.mean.device)
            new = train.labels.to(features.device) - classes
            count = int(new.max()) + 1
            if "codes" in tensors:
                more = _coded(_means(features.double() - self.mean.double(), new, count))
                tensors |= {name: torch.cat([tensors[name], tensor]) for name, tensor in more.items()}
            else:
                y, _ = self.places(features)
                y = y[_spaced(new, count)] if self.judgement.rule == "neighbours" else _means(y, new, count)
                tensors["rows"] = torch.cat([self.rows, _halved(y)])
        wider = Unknown(self.judgement, tensors)
        scores = wider.score(val.features.to(self.device), val.logits.to(self.device)).sort().values
        reached = float(scores[int(len(scores) * (1 - self.judgement.accepted) + 1e-9)])
        return Unknown(replace(self.judgement, threshold=min(self.judgement.threshold, reached)), tensors)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return next(self.buffers(), torch.empty(0)).device

    def places(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Where features are in B, y (N, rank), and what B leaves out of them, q (N,)."""
        away = features.float() - self.mean.float()
        p = away @ ((self.basis.float() - _ZERO) * self.scale)
        return p @ self.whiten, away.square().sum(1) - p.square().sum(1)


def unknown_skeleton(
    judgement: Judgement, shapes: Mapping[str, tuple[int, ...]], features: int | None, classes: int
) -> Unknown:
    """What a pack must have for its rule, without memory: `shapes` are those of its tensors."""
    if not classes:
        raise DomainError("it has a note on unknown images and no classes")
    if not judgement.has_tensors:
        return Unknown(judgement, {})
    basis, rows = shapes.get("basis", ()), shapes.get("rows", ())
    rank = basis[1] if len(basis) == 2 else 0
    count = classes if judgement.rule != "neighbours" else rows[0] if rows else 0
    if features is None or not 1 <= rank <= min(_MOST_RANK, features) or not 1 <= count <= _MOST_ROWS:
        raise DomainError(
            f"what it keeps to tell unknown images (basis {list(basis)}, rows {list(rows)}) is not for {features} "
            f"features and {classes} classes"
        )
    kept: dict[torch.dtype, dict[str, tuple[int, ...]]] = {
        torch.uint8: {"basis": (features, rank)},
        torch.float16: {"mean": (features,)},
        torch.float32: {"scale": (rank,), "whiten": (rank, rank)},
    }
    if judgement.rule in _BY_DISTANCE or (
        judgement.rule != "cosine" and "rows" in shapes
    ):  # means as polymask kept them before
        kept[torch.float16]["rows"], kept[torch.float32]["rest"] = (count, rank), (2,)
    else:
        kept[torch.uint8]["codes"], kept[torch.float32]["sizes"] = (count, -(-features // 4)), (count,)
    made = {n: torch.empty(size, dtype=d, device="meta") for d, sizes in kept.items() for n, size in sizes.items()}
    return Unknown(judgement, made)


class ScoredHead(BlockLinear):
    """A head that gives the score of an image after its logits, as one number more: (N, classes + 1)."""

    def __init__(self, head: nn.Linear, unknown: Unknown) -> None:
        blocks = head.blocks if isinstance(head, BlockLinear) else (head.out_features,)
        super().__init__(head, blocks)
        self.unknown = unknown

    def forward(self, features: Tensor) -> Tensor:
        logits = super().forward(features)
        return torch.cat([logits, self.unknown.score(features, logits).to(logits.dtype)[:, None]], -1)


def split_score(outputs: Tensor, classes: int) -> tuple[Tensor, Tensor | None]:
    """The logits and the scores in what a head gave; None where it gave no scores."""
    return (outputs, None) if outputs.shape[-1] == classes else (outputs[..., :classes], outputs[..., classes])


@dataclass(frozen=True)
class Observed:
    """What a network made of images whose classes are known."""

    features: Tensor  # (N, size)
    logits: Tensor  # (N, classes)
    labels: Tensor  # (N,)


def fit_unknown(
    rule: Rule, train: Observed | None, val: Observed, *, accepted: float = 0.95, rank: int = RANK
) -> Unknown:
    """The rule for a domain: its tensors from training images, its temperature and threshold from validation images.

    A rule that looks at logits alone keeps the class means too, where there are training images.
    """
    if rule not in RULES:
        raise DomainError(f"rule {rule!r} is not known; take one of {', '.join(RULES)}")
    if not 0 < accepted < 1 or not 1 <= rank <= _MOST_RANK:
        raise DomainError(f"accepted={accepted} must be between 0 and 1, rank={rank} from 1 to {_MOST_RANK}")
    if len(val.labels) < FEWEST:
        raise DataError(
            f"{len(val.labels)} validation images are too few to set a threshold by; give {FEWEST} at least"
        )
    judgement = Judgement(rule, fit_temperature(val.logits, val.labels), 0.0, accepted)
    enough = train if train is not None and len(train.labels) >= 2 else None
    if judgement.looks_at_features and enough is None:
        raise DataError(f"{rule} needs training images, two at least; give some, or take softmax or energy")
    tensors = {} if enough is None else _statistics(rule, enough, rank)
    judgement = replace(judgement, means=bool(tensors) and not judgement.looks_at_features)
    scores = Unknown(judgement, tensors).score(val.features, val.logits)
    beyond = int(len(scores) * (1 - accepted) + 1e-9)
    return Unknown(replace(judgement, threshold=float(scores.sort().values[beyond])), tensors)


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
    directions = _directions((away if rule in _BY_DISTANCE else away - own[labels])[:_DIRECTIONS_OF], rank)
    scale = (directions.abs().amax(0).clamp_min(1e-12) / (_ZERO - 1)).float()
    basis = ((directions / scale).round() + _ZERO).clamp(0, 255).to(torch.uint8)
    B = (basis.double() - _ZERO) * scale
    within = (away - own[labels]) @ B
    covariance = within.T @ within / len(within)
    ridge = 1e-3 * covariance.diagonal().mean().clamp_min(1e-12)
    covariance += ridge * torch.eye(rank, dtype=B.dtype, device=B.device)
    values, vectors = torch.linalg.eigh(covariance)
    whiten = vectors / values.clamp_min(float(ridge)).sqrt()
    kept = {"basis": basis, "scale": scale, "mean": mean, "whiten": whiten.float()}
    if rule not in _BY_DISTANCE:
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
