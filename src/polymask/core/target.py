"""What a head's outputs mean: classes, labels or values.

| kind | an image has | an output is | loss | measured by |
|---|---|---|---|---|
| classes | one class | a logit; softmax | cross-entropy | accuracy, in percent |
| labels | any number of labels | a logit; sigmoid | binary cross-entropy | mean average precision, in percent |
| values | numbers | a number, standardised | squared error | mean absolute error, in the numbers' own unit |

A value is standardised by the mean and the standard deviation of the training images. What images are compared with
(`truth`) is int64 (N,) for classes, int64 (N, labels) of zeros and ones for labels, and float (N, values) for values.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from polymask.errors import DataError, DomainError, near_matches

Kind = Literal["classes", "labels", "values"]
Balance = Literal["weights", "sampler"]
Truth = NDArray[Any]  # of a split, see above
_BINS = 5  # of values, where they are cut in proportion


@dataclass(frozen=True)
class Target(ABC):
    """What a head's outputs mean, how they are learned, and by which number they are measured.

    `weights` says how much each class counts in the loss, or each label where an image has it. They are for training
    alone: no pack keeps them.
    """

    weights: tuple[float, ...] | None = None

    kind: ClassVar[Kind]
    metric: ClassVar[str]  # what `measure` gives, as notes call it
    fewest: ClassVar[int] = 1  # names that a head of this kind needs
    scale: ClassVar[float] = 100.0  # of `tally` over images
    unit: ClassVar[str] = " %"
    lower_is_better: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """The metric in words."""
        return self.metric.replace("_", " ")

    @abstractmethod
    def check(self, place: str, truth: Truth, names: Sequence[str]) -> None:
        """Raise unless `truth` can be that of images; `place` names them."""

    def counts(self, truth: Truth, names: Sequence[str]) -> NDArray[np.int64]:
        """How many images have each of the names."""
        return np.full(len(names), len(truth), dtype=np.int64)

    def check_balance(self, balance: Balance | None) -> None:  # noqa: B027 - most can be balanced
        """Raise where images of this kind cannot be balanced."""

    def fitted(self, truth: Callable[[], Tensor], balance: Balance | None) -> Self:
        """The target with what it takes from the training images, whose `truth` is asked for only where it is needed.

        With the balance "weights", rare classes count as much as frequent ones.
        """
        return replace(self, weights=self._weights(truth())) if balance == "weights" else self

    def _weights(self, truth: Tensor) -> tuple[float, ...]:
        raise NotImplementedError

    @abstractmethod
    def loss(self, outputs: Tensor, truth: Tensor, smoothing: float = 0.0) -> Tensor:
        """The mean loss of outputs (N, names)."""

    @abstractmethod
    def tally(self, outputs: Tensor, truth: Tensor) -> float:
        """What a batch of training adds to the number that is shown for it: `scale` times the mean over images."""

    def kept(self, outputs: Tensor) -> Tensor:
        """What `measure` needs of outputs."""
        return outputs

    @abstractmethod
    def by_name(self, kept: Tensor, truth: Tensor) -> list[float | None]:
        """The metric over the images of a split, for each name; None where it cannot be told."""

    def measure(self, kept: Tensor, truth: Tensor) -> float:
        """The metric over all images of a split: the mean over names."""
        found = [result for result in self.by_name(kept, truth) if result is not None]
        return sum(found) / len(found) if found else 0.0

    def better(self, one: float, other: float) -> bool:
        """Whether one result is better than another."""
        return one < other if self.lower_is_better else one > other

    def best(self, results: Iterable[float | None]) -> float | None:
        """The best of some results; None where there is none."""
        known = [result for result in results if result is not None]
        return (min if self.lower_is_better else max)(known, default=None)

    @abstractmethod
    def answers(self, outputs: Tensor) -> Tensor:
        """What a person wants to know: probabilities, or values in their own unit."""

    def said(self, answer: Tensor, names: Sequence[str], top_k: int) -> dict[str, Any]:
        """One image's answer (names,) in words, as JSON: the `top_k` likeliest names."""
        return {"top": [{"class": name, "probability": share} for name, share in likeliest(answer, names, top_k)]}

    def note(self) -> dict[str, Any]:
        """What a pack says of it; nothing for classes."""
        return {"kind": self.kind}

    def text(self, value: float, width: int = 0) -> str:
        """A result of `measure` for a person."""
        return f"{value:{width}.2f}{self.unit}"


@dataclass(frozen=True)
class ClassTarget(Target):
    """One class for each image."""

    kind: ClassVar[Kind] = "classes"
    metric: ClassVar[str] = "accuracy"
    fewest: ClassVar[int] = 2

    def check(self, place: str, truth: Truth, names: Sequence[str]) -> None:
        if truth.ndim != 1 or truth.dtype != np.int64:
            raise DataError(f"{place} has no class for each image but {truth.dtype} {truth.shape}; name its target")
        if truth.min() < 0 or truth.max() >= len(names):
            raise DataError(
                f"{place} has labels from {truth.min()} to {truth.max()} for {len(names)} classes; number them from 0"
            )

    def counts(self, truth: Truth, names: Sequence[str]) -> NDArray[np.int64]:
        return np.bincount(truth, minlength=len(names))

    def _weights(self, truth: Tensor) -> tuple[float, ...]:
        """Images / (classes × images of the class): 1 on average over the images."""
        counts = torch.bincount(truth)
        share = len(truth) / (int((counts > 0).sum()) * counts.clamp_min(1))
        return tuple(share.tolist())

    def loss(self, outputs: Tensor, truth: Tensor, smoothing: float = 0.0) -> Tensor:
        if self.weights is None:
            return F.cross_entropy(outputs, truth, label_smoothing=smoothing)
        each = F.cross_entropy(outputs, truth, label_smoothing=smoothing, reduction="none")
        return (each * each.new_tensor(self.weights)[truth]).mean()

    def tally(self, outputs: Tensor, truth: Tensor) -> int:
        return int((outputs.argmax(1) == truth).sum())

    def kept(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(1)

    def by_name(self, kept: Tensor, truth: Tensor) -> list[float | None]:
        """Which share of a class's images are right; it cannot be told of classes after the last that has any."""
        groups = [kept[truth == place] == place for place in range(int(truth.max()) + 1)]
        return [100 * int(right.sum()) / len(right) if len(right) else None for right in groups]

    def measure(self, kept: Tensor, truth: Tensor) -> float:
        """The share of all images that are right."""
        return 100 * int((kept == truth).sum()) / len(truth)

    def answers(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)

    def note(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class LabelTarget(Target):
    """Any number of labels for each image, none included."""

    kind: ClassVar[Kind] = "labels"
    metric: ClassVar[str] = "mean_average_precision"

    def check(self, place: str, truth: Truth, names: Sequence[str]) -> None:
        if truth.shape[1:] != (len(names),) or not np.isin(truth, (0, 1)).all():
            raise DataError(f"{place} needs a 0 or 1 for each image and each of its {len(names)} labels")
        if not truth.any():
            raise DataError(f"{place} has no image with a label; add some")

    def counts(self, truth: Truth, names: Sequence[str]) -> NDArray[np.int64]:
        return cast(NDArray[np.int64], truth.sum(0))

    def _weights(self, truth: Tensor) -> tuple[float, ...]:
        """Images without the label / images with it."""
        have = truth.sum(0)
        return tuple(((len(truth) - have).clamp_min(1) / have.clamp_min(1)).tolist())

    def loss(self, outputs: Tensor, truth: Tensor, smoothing: float = 0.0) -> Tensor:
        wanted = truth.to(outputs.dtype) * (1 - smoothing) + smoothing / 2
        weights = None if self.weights is None else outputs.new_tensor(self.weights)
        return F.binary_cross_entropy_with_logits(outputs, wanted, pos_weight=weights)

    def tally(self, outputs: Tensor, truth: Tensor) -> float:
        """The share of an image's labels that are right: what precision is cannot be told by batches."""
        return float(((outputs > 0) == truth.bool()).float().mean(1).sum())

    def by_name(self, kept: Tensor, truth: Tensor) -> list[float | None]:
        """See `average_precision`; it cannot be told of a label that no image has."""
        pairs = zip(kept.T, truth.T.bool(), strict=True)
        return [100 * average_precision(scores, has) if has.any() else None for scores, has in pairs]

    def answers(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def said(self, answer: Tensor, names: Sequence[str], top_k: int) -> dict[str, Any]:
        """The likeliest labels, and which of all are likelier than not."""
        found = super().said(answer, names, top_k)
        return found | {"labels": [name for name, share in zip(names, answer.tolist(), strict=True) if share >= 0.5]}


@dataclass(frozen=True)
class ValueTarget(Target):
    """Numbers for each image; a head gives (number - mean) / std, with those of the training images."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    kind: ClassVar[Kind] = "values"
    metric: ClassVar[str] = "mean_absolute_error"
    scale: ClassVar[float] = 1.0
    unit: ClassVar[str] = ""
    lower_is_better: ClassVar[bool] = True

    def check(self, place: str, truth: Truth, names: Sequence[str]) -> None:
        if truth.shape[1:] != (len(names),) or not np.issubdtype(truth.dtype, np.floating):
            raise DataError(f"{place} needs a number for each image and each of its {len(names)} values")
        if not np.isfinite(truth).all():
            raise DataError(f"{place} has values that are not finite; give a number for each image")

    def check_balance(self, balance: Balance | None) -> None:
        if balance is not None:
            raise DataError(f"balance {balance} is for classes and labels; leave it out for values")

    def fitted(self, truth: Callable[[], Tensor], balance: Balance | None) -> Self:
        self.check_balance(balance)
        if self.mean is not None:
            return self
        found = truth().double()
        std = found.std(0, correction=0)
        std = torch.where(std > 0, std, torch.ones_like(std))  # all images have the same value
        return replace(self, mean=tuple(found.mean(0).tolist()), std=tuple(std.tolist()))

    def _moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if self.mean is None or self.std is None:
            raise DomainError("the target has not seen its training images yet; train the domain by fit or learn")
        return like.new_tensor(self.mean), like.new_tensor(self.std)

    def loss(self, outputs: Tensor, truth: Tensor, smoothing: float = 0.0) -> Tensor:
        wide = _wide(outputs)  # 16 bits have no room for a year
        mean, std = self._moments(wide)
        return F.mse_loss(wide, (truth.to(wide.dtype) - mean) / std)

    def tally(self, outputs: Tensor, truth: Tensor) -> float:
        return float((self.answers(_wide(outputs)) - truth).abs().mean(1).sum())

    def by_name(self, kept: Tensor, truth: Tensor) -> list[float | None]:
        return list((self.answers(kept.double()) - truth).abs().mean(0).tolist())

    def answers(self, outputs: Tensor) -> Tensor:
        mean, std = self._moments(outputs)
        return outputs * std + mean

    def text(self, value: float, width: int = 0) -> str:
        return f"{value:{width}.4g}"

    def said(self, answer: Tensor, names: Sequence[str], top_k: int) -> dict[str, Any]:
        """Every value by its name."""
        return {"values": dict(zip(names, answer.tolist(), strict=True))}

    def note(self) -> dict[str, Any]:
        self._moments(torch.empty(0))
        found = asdict(self)
        return super().note() | {name: list(found[name]) for name in ("mean", "std")}


def _wide(outputs: Tensor) -> Tensor:
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


CLASSES = ClassTarget()
TARGETS: dict[str, Target] = {target.kind: target for target in (CLASSES, LabelTarget(), ValueTarget())}


def get_target(target: str | Target) -> Target:
    """A target, or the one of a kind."""
    if isinstance(target, Target):
        return target
    if target not in TARGETS:
        raise DataError(f"target {target!r} is not known; {near_matches(target, TARGETS)}")
    return TARGETS[target]


def read_target(note: Any, names: Sequence[str] | None) -> Target:
    """The target that a pack's note describes; DomainError where it describes none for these names."""
    kind = note.get("kind") if isinstance(note, Mapping) else None
    if kind not in ("labels", "values") or not names:
        raise DomainError(f"the note on its target ({str(note)[:60]}) is not one for its head")
    if kind == "labels":
        return TARGETS[kind]
    moments = [note.get(name) for name in ("mean", "std")]
    for found in moments:
        numbers = isinstance(found, list) and all(type(value) in (int, float) for value in found)
        if not numbers or len(cast(list[float], found)) != len(names):
            raise DomainError(f"the note on its target needs mean and std, {len(names)} numbers each")
    mean, std = (tuple(map(float, found)) for found in moments if found is not None)
    if not all(value > 0 for value in std):
        raise DomainError("the std in the note on its target must be positive")
    return ValueTarget(mean=mean, std=std)


def likeliest(probabilities: Tensor, classes: Sequence[str], top: int) -> list[tuple[str, float]]:
    """The classes that have the largest of an image's probabilities (classes,), the largest first."""
    values, places = probabilities.topk(min(top, len(classes)))
    return [(classes[place], value) for place, value in zip(places.tolist(), values.tolist(), strict=True)]


def average_precision(scores: Tensor, has: Tensor) -> float:
    """The area under the steps of precision over recall: Σ (R_n - R_(n-1)) P_n, n over distinct scores (N,)."""
    order = scores.argsort(descending=True)
    scores, hits = scores[order], has[order].double().cumsum(0)
    last = torch.ones_like(has)
    last[:-1] = scores[1:] != scores[:-1]  # images with equal scores come together
    precision = hits / torch.arange(1, len(hits) + 1, dtype=hits.dtype, device=hits.device)
    recall = hits[last] / hits[-1]
    return float((recall.diff(prepend=recall.new_zeros(1)) * precision[last]).sum())


def strata(truth: Truth) -> NDArray[np.int64]:
    """A number for each image by which a split is cut in proportion: its class, rarest label, or fifth of the range.

    Several values are cut by the first of them.
    """
    if truth.ndim == 1:
        return truth
    if np.issubdtype(truth.dtype, np.floating):
        edges = np.quantile(truth[:, 0], np.arange(1, _BINS) / _BINS)
        return np.searchsorted(edges, truth[:, 0]).astype(np.int64)
    counts = np.where(truth > 0, truth.sum(0), len(truth) + 1)
    return np.where(truth.any(1), counts.argmin(1) + 1, 0).astype(np.int64)
