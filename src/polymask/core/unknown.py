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
spread within classes alone. All of it is fitted in `train/unknown.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymask.core.heads import BlockLinear
from polymask.core.parts import Part
from polymask.errors import DomainError

Rule = Literal["cosine", "softmax", "energy", "mahalanobis", "neighbours"]
RULES: tuple[Rule, ...] = get_args(Rule)
MOST_RANK, _MOST_ROWS = 64, 1 << 16  # that a pack may have
_NEIGHBOUR = 3  # which one counts
ZERO = 128  # the byte that stands for 0 in B
_LEVELS = (-1.51, -0.4528, 0.4528, 1.51)  # the best four for a normal distribution
BY_DISTANCE = ("mahalanobis", "neighbours")  # rules that keep rows in B, and what B leaves out


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
        return self.rule in ("cosine", *BY_DISTANCE)

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
        basis = (self.basis.double() - ZERO).cpu() * self.scale.double().cpu()
        p: Tensor = y @ torch.linalg.inv(self.whiten.double().cpu())
        return (middle.double().cpu().view(-1, 1, basis.shape[0]) + p @ basis.T).float()

    def class_means(self) -> Tensor:
        """μ (classes, features), in float32."""
        levels = torch.tensor(_LEVELS, device=self.codes.device)
        places = torch.stack([self.codes >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)[:, : len(self.mean)]
        return self.mean.float() + self.sizes.float()[:, None] * levels[places.int()]

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return next(self.buffers(), torch.empty(0)).device

    def places(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Where features are in B, y (N, rank), and what B leaves out of them, q (N,)."""
        away = features.float() - self.mean.float()
        p = away @ ((self.basis.float() - ZERO) * self.scale)
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
    if features is None or not 1 <= rank <= min(MOST_RANK, features) or not 1 <= count <= _MOST_ROWS:
        raise DomainError(
            f"what it keeps to tell unknown images (basis {list(basis)}, rows {list(rows)}) is not for {features} "
            f"features and {classes} classes"
        )
    kept: dict[torch.dtype, dict[str, tuple[int, ...]]] = {
        torch.uint8: {"basis": (features, rank)},
        torch.float16: {"mean": (features,)},
        torch.float32: {"scale": (rank,), "whiten": (rank, rank)},
    }
    if judgement.rule in BY_DISTANCE or (
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
