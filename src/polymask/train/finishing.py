"""What is settled once the loop of training is over, on val where there is one: the head, the size at test, 16 bits.

**The head.** It learns by small steps while the features under it still move. A logistic regression on the features as
they are in the end finds the best one for them:

    minimise   mean cross-entropy(W z + b) + λ/2 |W|²,       z the features, each of mean 0 and deviation 1 on train

by L-BFGS on all images at once, for falling λ, each from the solution before it. Means and deviations are then part of
W and b, so the head is the usual one. The same on the base's own features gives a domain without training.

**The size.** Random crops make things look larger in training than a centre crop of the same size does at test, so a
network often sees more on larger images than it was trained on (arXiv 1906.06423). Its features are others there, so
the head is fitted again for each size that is tried, to training images of that size. Which size is best depends on the
images: it is measured on val, from the smallest on as long as larger is better, and kept in the domain's input.

**16 bits.** Norms, scalars and head are rounded to numbers that 16 bits hold, unless val says that this costs anything.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from polymask.core.accounting import in_halves
from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.input import InputSpec
from polymask.core.registry import new_domain
from polymask.data.batches import Batches, as_batches
from polymask.data.cache import cache_splits
from polymask.data.images import DomainData
from polymask.data.loader import Loader
from polymask.data.preprocess import Preprocess, eval_transform
from polymask.data.split import Split
from polymask.errors import DataError, TrainingError
from polymask.train.learner import EpochRecord
from polymask.train.predict import all_labels, evaluate, feature_network, images_last, network, outputs
from polymask.train.recipe import LARGEST_SIDE, Recipe
from polymask.train.state import copied

if TYPE_CHECKING:
    from polymask.train.ranks import Ranks

STRENGTHS = (1e-1, 1e-2, 1e-3, 1e-4)  # λ
STEPS = 100  # of L-BFGS, for each λ, or as many as this much work allows:
SETTLED = 1e-6  # change of the loss in a step, at which it ends
WORK = 10**12  # images × features × classes × steps
MANY = 10**5  # images whose features are not gathered unasked
AT_ONCE = 16  # images for each core: what a layer makes of more does not stay in its cache
TRIED = (4 / 3, 5 / 3, 2.0)  # times the side in training
STEP = 8  # pixels: sides are multiples
LOSS_MAY_GROW = 1.01  # where rounding to 16 bits costs more than an image of val


class Fed(NamedTuple):
    """How a domain's images are fed, what each way that was tried gives on val, and features that were seen so."""

    input: InputSpec
    found: dict[str, float]
    seen: "tuple[Seen, Seen] | None" = None  # of train and val


def choose_test_input(
    base: Base,
    domain: Domain,
    data: DomainData,
    recipe: Recipe,
    tell: Callable[[str, float], None] = lambda way, value: None,
) -> Fed:
    """How the domain's images are best fed; its head is fitted for that, where the recipe fits heads again.

    Larger sides come one after the other, with the crop of training, until one is worse; then the whole short side at
    the best of them. What comes later costs more at every prediction, and must be `clearly_better`. `tell` hears all.
    """
    spec = domain.input
    if recipe.test_side is None or (recipe.test_side == "auto" and recipe.train_on_val):
        return Fed(spec, {})
    if recipe.test_side != "auto":
        chosen = spec.at(int(recipe.test_side))
        if not takes(base, domain, chosen):
            raise TrainingError(f"{base.name} does not take images of {chosen.size}; leave test_side={chosen.side} out")
        fits = recipe.refit is not None and not recipe.train_on_val
        return Fed(chosen, {}, _fitted_at(base, domain, data, chosen, recipe.refit)[1] if fits else None)
    best, seen = spec, None
    found = {spec: measured_at(base, domain, data, data.val, spec)}
    tell(way_of(spec), found[spec].value)
    for candidate in _larger(spec):
        if not takes(base, domain, candidate):
            break
        before = _head_of(domain)
        found[candidate], there = _fitted_at(base, domain, data, candidate, recipe.refit)
        tell(way_of(candidate), found[candidate].value)
        if clearly_better(domain, found[candidate], found[best]):
            best, seen = candidate, there
            continue
        _put_back(domain, before)
        if domain.target.better(found[best].value, found[candidate].value):
            break
    if not spec.squash and best.crop < 1:
        whole = replace(best, crop=1.0)
        found[whole] = measured_at(base, domain, data, data.val, whole)
        if clearly_better(domain, found[whole], found[best]):
            best, seen = whole, None
            if recipe.refit is not None:
                found[whole], seen = _fitted_at(base, domain, data, whole, recipe.refit)
        tell(way_of(whole), found[whole].value)
    return Fed(best, {way_of(one): reached.value for one, reached in found.items()}, seen)


def _fitted_at(
    base: Base, domain: Domain, data: DomainData, spec: InputSpec, strength: float | Literal["auto"] | None
) -> "tuple[Reached, tuple[Seen, Seen] | None]":
    """What a domain reaches on val whose images are fed so, with its head fitted to train that is; features of both."""
    too_many = strength == "auto" and len(data.train) > MANY
    if strength is None or not _fits_heads(domain) or too_many:
        return measured_at(base, domain, data, data.val, spec), None
    train, val = (gathered(base, domain, loader_at(data, split, spec).batches()) for split in (data.train, data.val))
    fit_head_again(domain, train, val, strength)
    assert domain.head is not None
    right = _right(domain.head, val)
    return Reached(100 * float(right.float().mean()), right), (train, val)


def way_of(spec: InputSpec) -> str:
    """How images are fed, in words."""
    return f"{spec.side} px, crop {spec.crop:.3g}"


class Reached(NamedTuple):
    """What a domain reaches on a split, and of each image whether it is right, where the target knows that."""

    value: float
    right: Tensor | None = None


def measured_at(base: Base, domain: Domain, data: DomainData, split: Split, spec: InputSpec) -> Reached:
    """What a domain reaches on a split whose images are fed in another way."""
    batches = loader_at(data, split, spec).batches()
    kept, truth = outputs(network(base, domain), batches, base.placed, domain.target)
    right = kept == truth if domain.target.kind == "classes" else None
    return Reached(domain.target.measure(kept, truth), right)


def clearly_better(domain: Domain, one: Reached, other: Reached) -> bool:
    """Whether one result is better than another by more than chance may do, on the same images.

    Of n images that only one of the two has right, √n more are one standard deviation. The best of several results that
    differ by chance alone would be better on val than anywhere else.
    """
    if one.right is None or other.right is None:
        return domain.target.better(one.value, other.value)
    ahead, behind = int((one.right & ~other.right).sum()), int((other.right & ~one.right).sum())
    return ahead - behind > math.sqrt(ahead + behind)


def loader_at(data: DomainData, split: Split, spec: InputSpec) -> Loader:
    """Batches of a split for measuring, decoded for this size."""
    preprocess = eval_transform(data, spec)
    (cache,) = cache_splits([split], preprocess.shrink)
    return Loader(cache, preprocess, batch_size=64)


def _larger(spec: InputSpec) -> Iterator[InputSpec]:
    for factor in TRIED:
        side = STEP * round(factor * spec.side / STEP)
        if spec.side < side <= LARGEST_SIDE:
            yield spec.at(side)


@torch.no_grad()
def takes(base: Base, domain: Domain, spec: InputSpec) -> bool:
    """Whether the network runs on images of this size: transformers with fixed positions do not."""
    try:
        with domain.in_mode(training=False):
            domain(base, base.placed(torch.zeros(1, *spec.shape)))
    except (RuntimeError, AssertionError, ValueError):
        return False
    return True


class Seen(NamedTuple):
    """Features of images, float32 (N, F), and their labels (N,)."""

    features: Tensor
    labels: Tensor


@dataclass(frozen=True)
class HeadAlone:
    """A domain that is a head on the base's own features, what it reaches, and what it was fitted to."""

    domain: Domain
    record: EpochRecord
    train: Seen
    val: Seen


def learn_head(base: Base, data: DomainData, side: int) -> HeadAlone:
    """A head alone, for images of this size: no training, one pass over the images."""
    domain = new_domain(base, "classifier-only", data.classes, target=data.target).to(base.device)
    domain.input = replace(base.input.at(side), squash=data.squash)
    train, val = (gathered(base, domain, loader_at(data, s, domain.input).batches()) for s in (data.train, data.val))
    record = _fit_head(domain, train, val, STRENGTHS)
    return HeadAlone(domain.restore(domain.stored()), record, train, val)


def refit_head(
    base: Base, domain: Domain, train: Batches, val: Batches | None, strength: float | Literal["auto"]
) -> None:
    """Fit the head again on the features that were learned; with val, only where that is better there.

    "auto" does nothing where there is nothing to choose on, no head for classes, or more images than memory may have
    room for; a number says that it must be.
    """
    if strength == "auto" and (val is None or not _fits_heads(domain) or len(getattr(train, "labels", ())) > MANY):
        return
    held_out = None if val is None else gathered(base, domain, val.batches())
    fit_head_again(domain, gathered(base, domain, _as_at_test(train).batches()), held_out, strength)


def fit_head_again(domain: Domain, train: "Seen", val: "Seen | None", strength: float | Literal["auto"]) -> None:
    """The same by features that were gathered before."""
    if domain.head is None or not _fits_heads(domain):
        raise TrainingError(f"refit is for classes, and this is a domain of {domain.target.kind}; leave it out")
    before = _head_of(domain)
    reached = None if val is None else int(_right(domain.head, val).sum())
    _fit_head(domain, train, val, STRENGTHS if strength == "auto" else (float(strength),))
    if val is not None and reached is not None and int(_right(domain.head, val).sum()) < reached:
        _put_back(domain, before)


def _fits_heads(domain: Domain) -> bool:
    return domain.head is not None and domain.target.kind == "classes"


def _head_of(domain: Domain) -> dict[str, Tensor]:
    """A copy of the head, as it is."""
    return {} if domain.head is None else {name: tensor.clone() for name, tensor in domain.head.state_dict().items()}


def _put_back(domain: Domain, head: dict[str, Tensor]) -> None:
    if domain.head is not None:
        domain.head.load_state_dict(head)


@torch.no_grad()
def _right(head: Callable[[Tensor], Tensor], seen: "Seen") -> Tensor:
    """Of each image, whether its largest logit is that of its class."""
    return (head(seen.features).argmax(1) == seen.labels).cpu()


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
    return _fit_head(domain, gathered(base, domain, train.batches()), held_out, strengths)


def _fit_head(domain: Domain, train: Seen, held_out: Seen | None, strengths: Sequence[float]) -> EpochRecord:
    head, labels = domain.head, train.labels
    assert head is not None
    mean, deviation = train.features.mean(0), train.features.std(0).clamp(min=1e-6)
    features = (train.features - mean) / deviation
    weight = torch.zeros(head.out_features, head.in_features, device=features.device, requires_grad=True)
    bias = torch.zeros(head.out_features, device=features.device, requires_grad=True)
    kept, record = (weight, bias), EpochRecord(0, 0.0, 0.0, None)
    for strength in strengths:
        _minimise(features, labels, weight, bias, strength)
        found = _reached(features, labels, weight, bias)
        accuracy = None
        if held_out is not None:
            accuracy = _reached((held_out.features - mean) / deviation, held_out.labels, weight, bias)[1]
        if accuracy is None or record.val_accuracy is None or accuracy > record.val_accuracy:
            kept = weight.detach().clone(), bias.detach().clone()
            record = EpochRecord(0, *found, accuracy)
    with torch.no_grad():
        head.weight.copy_(kept[0] / deviation)
        head.bias.copy_(kept[1] - (kept[0] / deviation) @ mean)
    return record


@torch.no_grad()
def _reached(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor) -> tuple[float, float]:
    """Loss and accuracy in percent."""
    logits = features @ weight.T + bias
    return float(cross_entropy(logits, labels)), 100 * float((logits.argmax(1) == labels).float().mean())


def _minimise(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, strength: float) -> None:
    steps = max(1, min(STEPS, WORK // (features.numel() * len(weight))))
    solver = torch.optim.LBFGS([weight, bias], max_iter=steps, tolerance_change=SETTLED, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        value = cross_entropy(features @ weight.T + bias, labels) + strength / 2 * weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        solver.step(loss)  # type: ignore[no-untyped-call]


@torch.no_grad()
def gathered(base: Base, domain: Domain, batches: Iterable[tuple[Tensor, Tensor]]) -> Seen:
    """The features of all images, and their labels."""
    run, features, truths = feature_network(base, domain), [], []
    for images, labels in batches:
        at_once = AT_ONCE * torch.get_num_threads() if base.device.type == "cpu" else len(images)
        features += [run(part).float() for part in torch.split(base.placed(images_last(images)), at_once)]
        truths.append(labels.to(base.device))
    if not truths:
        raise DataError("there is no image to look at; give some")
    return Seen(torch.cat(features), torch.cat(truths))


def round_numbers(
    base: Base, domain: Domain, val: Any, before: float | None, ranks: "Ranks | None"
) -> tuple[bool, float | None]:
    """Round norms, scalars and head to 16 bits, unless val says that this costs anything.

    `before` is what val says of the domain as it is, where that is known. A tenth of a percent may be lost, or one
    image. With few images more of them may lie on the border between two classes, where any rounding decides: classes
    may lose more as long as their loss grows by less than a hundredth. Gives whether numbers are rounded, and what val
    says of the domain now.
    """
    exact = copied(domain.stored())
    if val is None:
        domain.restore(in_halves(domain))
        return True, None
    batches, measure = as_batches(val, domain.input, domain.classes), evaluate if ranks is None else ranks.evaluate
    before = measure(base, domain, batches) if before is None else before
    domain.restore(in_halves(domain))
    after = measure(base, domain, batches)
    lost = after - before if domain.target.lower_is_better else before - after
    allowed = max(0.1, 100 / len(all_labels(batches))) if domain.target.kind == "classes" else 1e-3 * abs(before)
    if lost <= allowed:
        return True, after
    rounded, losses = copied(domain.stored()), []
    if domain.target.kind == "classes" and ranks is None:
        losses.append(_mean_loss(base, domain, batches))
    domain.restore(exact)
    if not losses or losses[0] > LOSS_MAY_GROW * _mean_loss(base, domain, batches):
        return False, before
    domain.restore(rounded)
    return True, after


@torch.no_grad()
def _mean_loss(base: Base, domain: Domain, batches: Batches) -> float:
    """The mean of the target's loss over images."""
    net, total, images = network(base, domain), 0.0, 0
    for some, labels in batches.batches():
        total += len(labels) * float(domain.target.loss(net(base.placed(some)).float(), labels.to(base.device)))
        images += len(labels)
    return total / images
