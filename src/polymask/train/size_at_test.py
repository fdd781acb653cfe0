"""The size of images at test, chosen on validation.

Random crops make things look larger in training than a centre crop of the same size does at test, so a network often
sees more on larger images than it was trained on (arXiv 1906.06423). Which size is best depends on the images: it is
measured on val, for the domain as it is, and kept in the domain's input.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.input import InputSpec
from polymask.data.cache import cache_splits
from polymask.data.images import DomainData
from polymask.data.loader import Loader
from polymask.data.preprocess import eval_transform
from polymask.data.split import Split
from polymask.errors import TrainingError
from polymask.train.predict import evaluate
from polymask.train.recipe import LARGEST_SIDE, Recipe

TRIED = (1.0, 7 / 6, 4 / 3, 5 / 3)  # times the side in training
STEP = 8  # pixels: sides are multiples


def choose_test_input(
    base: Base, domain: Domain, data: DomainData, recipe: Recipe
) -> tuple[InputSpec, dict[str, float]]:
    """How the domain's images are best fed, and what each way gives on val, by side and share of the crop.

    The sides come first, with the crop of training; then the whole short side at the best of them. Of equal results
    the first counts, which is the smaller size.
    """
    spec = domain.input
    if recipe.test_side is None:
        return spec, {}
    if recipe.test_side != "auto":
        chosen = spec.at(int(recipe.test_side))
        if not takes(base, domain, chosen):
            raise TrainingError(f"{base.name} does not take images of {chosen.size}; leave test_side={chosen.side} out")
        return chosen, {}
    if recipe.train_on_val:
        raise TrainingError("test_side='auto' is chosen on val, and train_on_val leaves none; give a number of pixels")
    found: dict[InputSpec, float] = {}
    for candidate in _sides(spec):
        if candidate == spec or takes(base, domain, candidate):
            found[candidate] = measured_at(base, domain, data, data.val, candidate)
    best = _best(domain, found)
    if not spec.squash and best.crop < 1:
        whole = replace(best, crop=1.0)
        found[whole] = measured_at(base, domain, data, data.val, whole)
        best = _best(domain, found)
    return best, {f"{one.side} px, crop {one.crop:.3g}": value for one, value in found.items()}


def measured_at(base: Base, domain: Domain, data: DomainData, split: Split, spec: InputSpec) -> float:
    """What a domain reaches on a split whose images are fed in another way."""
    return evaluate(base, domain, loader_at(data, split, spec))


def loader_at(data: DomainData, split: Split, spec: InputSpec) -> Loader:
    """Batches of a split for measuring, decoded for this size."""
    preprocess = eval_transform(data, spec)
    (cache,) = cache_splits([split], preprocess.shrink)
    return Loader(cache, preprocess, batch_size=64)


def _sides(spec: InputSpec) -> Iterator[InputSpec]:
    yield spec
    tried = {STEP * round(factor * spec.side / STEP) for factor in TRIED[1:]}
    for side in sorted(tried):
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


def _best(domain: Domain, found: dict[InputSpec, float]) -> InputSpec:
    best = next(iter(found))
    for candidate, value in found.items():
        if domain.target.better(value, found[best]):
            best = candidate
    return best
