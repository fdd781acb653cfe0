"""From images to a trained domain, in one call."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from polymask.core.accounting import bits_per_weight
from polymask.core.base import Base
from polymask.core.domain import Domain, new_domain
from polymask.core.input import InputSpec
from polymask.core.method import Method
from polymask.data.cache import cache_domain
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.data.loader import Loader
from polymask.data.transforms import eval_transform, train_transform
from polymask.train.fit import Listener, fit
from polymask.train.likeness import likeness_note
from polymask.train.method_text import method_by
from polymask.train.predict import evaluate
from polymask.train.recipe import Recipe, get_recipe
from polymask.train.state import EpochRecord

if TYPE_CHECKING:
    from polymask.train.ranks import Ranks


@dataclass(frozen=True)
class Loaders:
    """Batches of a domain's splits; `val` is None where training takes it all."""

    train: Loader
    val: Loader | None
    test: Loader | None


@dataclass(frozen=True)
class Learned:
    """A trained domain in its stored form, with what was measured; accuracies in percent."""

    domain: Domain
    history: list[EpochRecord]
    test_accuracy: float | None

    @property
    def at_chance(self) -> bool:
        """Whether the last epoch did no better than guessing: loss log C, accuracy 1 / C.

        So ends a training whose rate was too high: the same features for every image.
        """
        count = len(self.domain.classes or [])
        if count < 2 or not self.history:
            return False
        last = self.history[-1]
        return last.loss > 0.99 * math.log(count) and last.train_accuracy < 150 / count


def learn(
    base: Base,
    data: DomainData | str | Path,
    method: str | Method = "affine-full",
    recipe: str | Recipe = "quick",
    *,
    loaders: Loaders | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    ranks: "Ranks | None" = None,
    **options: Any,
) -> Learned:
    """Teach `base` a domain and measure it on test.

    `options` are the method's. `loaders` saves decoding again what several methods share. With
    `ranks` (see `polymask.distributed`) several processes share the work.
    """
    recipe = get_recipe(recipe)
    if not isinstance(data, DomainData):
        data = load_data(data, seed=seed)
    loaders = loaders or make_loaders(data, base.input, recipe, seed=seed)
    torch.manual_seed(seed)
    if isinstance(method, str):
        method = method_by(recipe, method, **options)
    method.check_own(False)  # these are one domain's images
    domain = new_domain(base, method, data.classes).to(base.device)
    domain.input = replace(recipe.input(base.input), squash=data.squash)
    history = fit(
        base,
        domain,
        loaders.train,
        loaders.val,
        recipe,
        seed=seed,
        checkpoint=checkpoint,
        resume=resume,
        listener=listener,
        ranks=ranks,
    )
    measure = evaluate if ranks is None else ranks.evaluate
    accuracy = None if loaders.test is None else measure(base, domain, loaders.test)
    best = max((r.val_accuracy for r in history if r.val_accuracy is not None), default=None)
    about = {"seed": seed, "data": data.name} | likeness_note(base, data.train)
    domain.recipe = recipe.to_json() | about
    domain.metrics = {
        "val_accuracy": best,
        "test_accuracy": accuracy,
        "bits_per_weight": bits_per_weight(base, domain),
    }
    return Learned(domain, history, accuracy)


def make_loaders(
    data: DomainData,
    base_input: InputSpec,
    recipe: Recipe,
    *,
    seed: int = 0,
    cache: Path | None = None,
    crops: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Loaders:
    """Decode a domain's images once and give the batches that a recipe asks for.

    A test image is fed as `crops` pieces of it: 1, 5 or 10.
    """
    spec = recipe.input(base_input)
    if recipe.mirror is not None:
        data = replace(data, mirror=recipe.mirror)
    caches = cache_domain(data, spec, folder=cache, progress=progress)
    scale = None if recipe.crop_scale == (1.0, 1.0) else recipe.crop_scale
    augment, centre = train_transform(data, spec, scale=scale), eval_transform(data, spec)
    images = caches.train_val if recipe.train_on_val else caches.train
    train = Loader(images, augment, batch_size=recipe.batch_size, seed=seed, shuffle=True)
    val = None if recipe.train_on_val else Loader(caches.val, centre, batch_size=64)
    many = eval_transform(data, spec, crops=crops)
    test = None if caches.test is None else Loader(caches.test, many, batch_size=64)
    return Loaders(train, val, test)
