"""A head that is fitted to all features at once: a logistic regression.

In training a head learns by small steps while the features under it still move. A logistic regression on the features
as they are in the end finds the best one for them:

    minimise   mean cross-entropy(W z + b) + λ/2 |W|²,       z the features, each of mean 0 and deviation 1 on train

by L-BFGS on all images at once, for falling λ, each from the solution before it; val chooses among them. Means and
deviations are then part of W and b, so the head is the usual one. The same on the base's own features gives a domain
without training. Where a recipe balances classes, by either way, each has the same weight in the mean.

**The last head.** Training images are what the network has learned from: it tells their classes apart more easily than
those of new images, such as those of val. So when val has chosen all that it chooses, and has said what is reached, the
head is fitted to val too, with the penalty that was best.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.registry import new_domain
from polymask.core.target import CLASSES, ClassTarget
from polymask.data.batches import Batches
from polymask.data.images import DomainData
from polymask.data.loader import Loader, loader_at
from polymask.data.preprocess import Preprocess
from polymask.errors import DataError, TrainingError
from polymask.train.learner import EpochRecord
from polymask.train.predict import feature_network, images_last
from polymask.train.recipe import Recipe

STRENGTHS = (1e-1, 1e-2, 1e-3, 1e-4)  # λ
STEPS = 100  # of L-BFGS, for each λ, or as many as this much work allows:
SETTLED = 1e-6  # change of the loss in a step, at which it ends
WORK = 10**12  # images × features × classes × steps
MANY = 10**5  # images whose features are not gathered unasked
AT_ONCE = 16  # images for each core: what a layer makes of more does not stay in its cache


class Seen(NamedTuple):
    """Features of images (N, F), in 32 bits at least, and their labels (N,)."""

    features: Tensor
    labels: Tensor


@dataclass(frozen=True)
class HeadAlone:
    """A domain that is a head on the base's own features, what it reaches, and what it was fitted to."""

    domain: Domain
    record: EpochRecord
    train: Seen
    val: Seen


def learn_head(base: Base, data: DomainData, side: int, *, balanced: bool = False) -> HeadAlone:
    """A head alone, for images of this size: no training, one pass over the images."""
    domain = new_domain(base, "classifier-only", data.classes, target=data.target).to(base.device)
    domain.input = replace(base.input.at(side), squash=data.squash)
    train, val = (gathered(base, domain, loader_at(s, domain.input).batches()) for s in (data.train, data.val))
    record = fit_features(domain, train, val, STRENGTHS, balanced=balanced).record
    return HeadAlone(domain.restore(domain.stored()), record, train, val)


def refit_head(base: Base, domain: Domain, train: Batches, val: Batches | None, recipe: Recipe) -> None:
    """Fit the head again on the features that were learned, as `recipe.refit` says; with val, where that is better.

    "auto" does nothing where there is nothing to choose on, no head for classes, or more images than memory may have
    room for; a number says that it must be.
    """
    strength = recipe.refit
    if strength is None:
        return
    if strength == "auto" and (val is None or not fits_heads(domain) or len(getattr(train, "labels", ())) > MANY):
        return
    held_out = None if val is None else gathered(base, domain, val.batches())
    seen = gathered(base, domain, _as_at_test(train).batches())
    fit_head_again(domain, seen, held_out, strength, balanced=recipe.balance is not None)


def fit_head_again(
    domain: Domain, train: Seen, val: Seen | None, strength: float | Literal["auto"], *, balanced: bool
) -> None:
    """The same by features that were gathered before."""
    if domain.head is None or not fits_heads(domain):
        raise TrainingError(f"refit is for classes, and this is a domain of {domain.target.kind}; leave it out")
    before = copy_of_head(domain)
    reached = None if val is None else int(right_ones(domain.head, val).sum())
    fit_features(domain, train, val, STRENGTHS if strength == "auto" else (float(strength),), balanced=balanced)
    if val is not None and reached is not None and int(right_ones(domain.head, val).sum()) < reached:
        put_head_back(domain, before)


def fits_heads(domain: Domain) -> bool:
    """Whether the domain has a head that a regression can fit."""
    return domain.head is not None and domain.target.kind == "classes"


def copy_of_head(domain: Domain) -> dict[str, Tensor]:
    """A copy of the head, as it is."""
    return {} if domain.head is None else {name: tensor.clone() for name, tensor in domain.head.state_dict().items()}


def put_head_back(domain: Domain, head: dict[str, Tensor]) -> None:
    """Let the domain have a head again that it had."""
    if domain.head is not None:
        domain.head.load_state_dict(head)


@torch.no_grad()
def right_ones(head: Callable[[Tensor], Tensor], seen: Seen) -> Tensor:
    """Of each image, whether its largest logit is that of its class."""
    return (head(seen.features).argmax(1) == seen.labels).cpu()


class Reached(NamedTuple):
    """What a domain reaches on a split, and of each image whether it is right, where the target knows that."""

    value: float
    right: Tensor | None = None


def reached_on(domain: Domain, seen: Seen) -> Reached:
    """What the head reaches by features that were gathered, in percent of the images."""
    assert domain.head is not None
    right = right_ones(domain.head, seen)
    return Reached(100 * float(right.float().mean()), right)


def clearly_better(domain: Domain, one: Reached, other: Reached) -> bool:
    """Whether one result is better than another by more than chance may do, on the same images.

    Of n images that only one of the two has right, √n more are one standard deviation. The best of several results that
    differ by chance alone would be better on val than anywhere else.
    """
    if one.right is None or other.right is None:
        return domain.target.better(one.value, other.value)
    ahead, behind = int((one.right & ~other.right).sum()), int((other.right & ~one.right).sum())
    return ahead - behind > math.sqrt(ahead + behind)


class LastHead(NamedTuple):
    """A head that val can be added to: what it reaches on val, its penalty, what it was fitted to and measured on."""

    reached: float
    strength: float
    train: Seen
    val: Seen
    balanced: bool

    def add_val(self, domain: Domain) -> None:
        """Fit the head of the domain to val too; all else of it stays."""
        both = Seen(*(torch.cat(parts) for parts in zip(self.train, self.val, strict=True)))
        stronger = [each for each in STRENGTHS if each > self.strength]  # each begins where the one before ends
        fit_features(domain, both, None, (*stronger, self.strength), balanced=self.balanced)


def fit_last_head(
    base: Base, domain: Domain, data: DomainData, recipe: Recipe, seen: tuple[Seen, Seen] | None
) -> LastHead | None:
    """Fit the head to training images, with the penalty that is best on val, so that val can be added.

    `seen` are features of train and val, where they are known. None where the recipe does not ask for it, where there
    is no head for classes, where there are more images than memory may have room for, or where the head before is
    better on val by more than chance.
    """
    if recipe.refit is None or not recipe.refit_on_val or recipe.train_on_val or not fits_heads(domain):
        return None
    if len(data.train) + len(data.val) > MANY:
        return None
    if seen is None:
        train, val = (gathered(base, domain, loader_at(s, domain.input).batches()) for s in (data.train, data.val))
    else:
        train, val = seen
    before, head = reached_on(domain, val), copy_of_head(domain)
    tried, balanced = STRENGTHS if recipe.refit == "auto" else (recipe.refit,), recipe.balance is not None
    strength = fit_features(domain, train, val, tried, balanced=balanced).strength
    after = reached_on(domain, val)
    if clearly_better(domain, before, after):
        put_head_back(domain, head)
        return None
    return LastHead(after.value, strength, train, val, balanced)


def _as_at_test(train: Batches) -> Batches:
    """Training images as they are fed at test, where they are decoded here."""
    if not isinstance(train, Loader):
        return train
    return Loader(train.cache, Preprocess(train.spec), batch_size=64)


def fit_head(
    base: Base, domain: Domain, train: Batches, val: Batches | None, strengths: Sequence[float] = STRENGTHS
) -> EpochRecord:
    """Fit the head to features as they are; what it reaches, as an only epoch.

    Of several strengths the best on val is kept, of equal ones the strongest; without val the last.
    """
    if domain.head is None or domain.target.kind != "classes":
        raise TrainingError("a logistic regression needs a head for classes")
    held_out = None if val is None else gathered(base, domain, val.batches())
    return fit_features(domain, gathered(base, domain, train.batches()), held_out, strengths).record


class Fit(NamedTuple):
    """What a head reaches that was fitted, as an only epoch, and the strength that was best."""

    record: EpochRecord
    strength: float


def fit_features(
    domain: Domain, train: Seen, held_out: Seen | None, strengths: Sequence[float], *, balanced: bool = False
) -> Fit:
    """Fit the head to features, for falling strengths; the best on `held_out` is kept, without it the last.

    `balanced` gives every class the same weight.
    """
    head, labels = domain.head, train.labels
    assert head is not None
    mean, deviation = train.features.mean(0), train.features.std(0).clamp(min=1e-6)
    features = (train.features - mean) / deviation
    weight = features.new_zeros(head.out_features, head.in_features).requires_grad_()
    bias = features.new_zeros(head.out_features).requires_grad_()
    counting = CLASSES.fitted(lambda: labels, "weights" if balanced else None)
    kept, best = (weight, bias), Fit(EpochRecord(0, 0.0, 0.0, None), strengths[0])
    for strength in strengths:
        _minimise(features, labels, weight, bias, strength, counting)
        found = _reached(features, labels, weight, bias)
        accuracy = None
        if held_out is not None:
            accuracy = _reached((held_out.features - mean) / deviation, held_out.labels, weight, bias)[1]
        if accuracy is None or best.record.val_accuracy is None or accuracy > best.record.val_accuracy:
            kept = weight.detach().clone(), bias.detach().clone()
            best = Fit(EpochRecord(0, *found, accuracy), strength)
    with torch.no_grad():
        head.weight.copy_(kept[0] / deviation)
        head.bias.copy_(kept[1] - (kept[0] / deviation) @ mean)
    return best


@torch.no_grad()
def _reached(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor) -> tuple[float, float]:
    """Loss and accuracy in percent."""
    logits = features @ weight.T + bias
    return float(cross_entropy(logits, labels)), 100 * float((logits.argmax(1) == labels).float().mean())


def _minimise(
    features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, strength: float, target: ClassTarget
) -> None:
    steps = max(1, min(STEPS, WORK // (features.numel() * len(weight))))
    solver = torch.optim.LBFGS([weight, bias], max_iter=steps, tolerance_change=SETTLED, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        value = target.loss(features @ weight.T + bias, labels) + strength / 2 * weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        solver.step(loss)  # type: ignore[no-untyped-call]


@torch.no_grad()
def gathered(base: Base, domain: Domain, batches: Iterable[tuple[Tensor, Tensor]]) -> Seen:
    """The features of all images, in 32 bits where the base has fewer, and their labels."""
    run, features, truths = feature_network(base, domain), [], []
    wide = torch.promote_types(base.weight_dtype, torch.float32)
    for images, labels in batches:
        at_once = AT_ONCE * torch.get_num_threads() if base.device.type == "cpu" else len(images)
        features += [run(part).to(wide) for part in torch.split(base.placed(images_last(images)), at_once)]
        truths.append(labels.to(base.device))
    if not truths:
        raise DataError("there is no image to look at; give some")
    return Seen(torch.cat(features), torch.cat(truths))
