"""The size of images at test, chosen on val.

Random crops make things look larger in training than a centre crop of the same size does at test, so a network often
sees more on larger images than it was trained on (arXiv 1906.06423). Its features are others there, so the head is
fitted again for each size that is tried, to training images of that size (see `regression`). Which size is best depends
on the images: it is measured on val, from the smallest on as long as larger is better, and kept in the domain's input.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.input import InputSpec
from polymask.data.images import DomainData
from polymask.data.loader import loader_at
from polymask.data.split import Split
from polymask.errors import TrainingError
from polymask.train.predict import network, outputs
from polymask.train.recipe import LARGEST_SIDE, Recipe
from polymask.train.regression import (
    MANY,
    Reached,
    Seen,
    clearly_better,
    copy_of_head,
    fit_head_again,
    fits_heads,
    gathered,
    put_head_back,
    reached_on,
)

TRIED = (4 / 3, 5 / 3, 2.0)  # times the side in training
STEP = 8  # pixels: sides are multiples


class Fed(NamedTuple):
    """How a domain's images are fed, what each way that was tried gives on val, and features that were seen so."""

    input: InputSpec
    found: dict[str, float]
    seen: tuple[Seen, Seen] | None = None  # of train and val


def choose_test_input(
    base: Base,
    domain: Domain,
    data: DomainData,
    recipe: Recipe,
    tell: Callable[[str, float], None] = lambda way, value: None,
    until: float | None = None,
) -> Fed:
    """How the domain's images are best fed; its head is fitted for that, where the recipe fits heads again.

    Larger sides come one after the other, with the crop of training, until one is worse; then the whole short side at
    the best of them. What comes later costs more at every prediction, and must be `clearly_better`. `tell` hears all.
    No side is begun that is not expected to be done `until` then, a time of `time.perf_counter`.
    """
    spec = domain.input
    if recipe.test_side is None or (recipe.test_side == "auto" and recipe.train_on_val):
        return Fed(spec, {})
    if recipe.test_side != "auto":
        chosen = spec.at(int(recipe.test_side))
        if not takes(base, domain, chosen):
            raise TrainingError(f"{base.name} does not take images of {chosen.size}; leave test_side={chosen.side} out")
        fits = recipe.refit is not None and not recipe.train_on_val
        return Fed(chosen, {}, _fitted_at(base, domain, data, chosen, recipe)[1] if fits else None)
    best, seen, began = spec, None, time.perf_counter()
    found = {spec: measured_at(base, domain, data.val, spec)}
    by_area = (time.perf_counter() - began) / (len(data.val) * spec.side**2)
    tell(way_of(spec), found[spec].value)
    for candidate in _larger(spec):
        takes_long = by_area * candidate.side**2 * (len(data.train) + len(data.val))
        if until is not None and time.perf_counter() + takes_long > until:
            break
        if not takes(base, domain, candidate):
            break
        before = copy_of_head(domain)
        found[candidate], there = _fitted_at(base, domain, data, candidate, recipe)
        tell(way_of(candidate), found[candidate].value)
        if clearly_better(domain, found[candidate], found[best]):
            best, seen = candidate, there
            continue
        put_head_back(domain, before)
        if domain.target.better(found[best].value, found[candidate].value):
            break
    if not spec.squash and best.crop < 1:
        whole = replace(best, crop=1.0)
        found[whole] = measured_at(base, domain, data.val, whole)
        if clearly_better(domain, found[whole], found[best]):
            best, seen = whole, None
            if recipe.refit is not None:
                found[whole], seen = _fitted_at(base, domain, data, whole, recipe)
        tell(way_of(whole), found[whole].value)
    return Fed(best, {way_of(one): reached.value for one, reached in found.items()}, seen)


def _fitted_at(
    base: Base, domain: Domain, data: DomainData, spec: InputSpec, recipe: Recipe
) -> tuple[Reached, tuple[Seen, Seen] | None]:
    """What a domain reaches on val whose images are fed so, with its head fitted to train that is; features of both."""
    too_many = recipe.refit == "auto" and len(data.train) > MANY
    if recipe.refit is None or not fits_heads(domain) or too_many:
        return measured_at(base, domain, data.val, spec), None
    train, val = (gathered(base, domain, loader_at(split, spec).batches()) for split in (data.train, data.val))
    fit_head_again(domain, train, val, recipe.refit, balanced=recipe.balance is not None)
    return reached_on(domain, val), (train, val)


def way_of(spec: InputSpec) -> str:
    """How images are fed, in words."""
    return f"{spec.side} px, crop {spec.crop:.3g}"


def measured_at(base: Base, domain: Domain, split: Split, spec: InputSpec) -> Reached:
    """What a domain reaches on a split whose images are fed in another way."""
    batches = loader_at(split, spec).batches()
    kept, truth = outputs(network(base, domain), batches, base.placed, domain.target)
    right = kept == truth if domain.target.kind == "classes" else None
    return Reached(domain.target.measure(kept, truth), right)


def _larger(spec: InputSpec) -> Iterator[InputSpec]:
    for side in dict.fromkeys(STEP * round(factor * spec.side / STEP) for factor in TRIED):
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
