"""So many minutes on this machine: size, epochs and the way to learn that fit into them.

A few timed steps tell which layout of images and which type of numbers are fastest here (a processor that knows
bfloat16 may be faster with it, another many times slower), and what an image costs by its size. The number of
images then says how large they can be and how often they can be seen. Larger images first, as long as each is seen
often enough; then more epochs, up to a bound. The first half of the epochs has smaller images, and the size at test is
chosen on val (see `sizing`).

A head of frozen features takes one pass over the images only (see `regression`). It is fitted too, and val decides
which of the two is kept. Where there is no time for more than a few epochs it is all that is done, on larger images.
Where more time is left than training can use, a few short trainings choose its rate on val.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from polymask.core.base import Base
from polymask.core.method import Method
from polymask.core.registry import new_domain
from polymask.data.cache import cache_splits, shrink_of
from polymask.data.images import DomainData
from polymask.data.split import SubsetSplit
from polymask.errors import TrainingError
from polymask.train.fit import fit
from polymask.train.learn import make_loaders
from polymask.train.learner import DomainLearner
from polymask.train.recipe import MOST_EPOCHS, RATES, RECIPES, Recipe
from polymask.train.regression import STRENGTHS, WORK, Reached, clearly_better
from polymask.train.sizing import TRIED, measured_at, takes

SIDES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 288, 320, 384)
OFTEN = 8  # epochs that come before larger images
FEW = 3  # epochs: with fewer, a head of frozen features has the whole time
SMALLER = 0.75  # the side of the first half, in proportion
MEASURING = 0.33  # of what a training image costs, for one that is only classified
CLIMBED = 1  # larger sizes at test that are planned for; where more are better, it takes a little longer
FITS = 4 + CLIMBED  # of heads: frozen features, after training, larger sizes, the last one, and that with val
FROZEN = 0.2  # of the time goes to a head of frozen features, at most
ALONE = 0.8  # the same where nothing else is done
MARGIN = 0.9  # of the time is planned for: machines do other things too
FACTORS = (1.0, 0.3, 3.0)  # of the recipe's rate: what is tried where there is time for it
SHORT = 6  # epochs of such a trial
EVALUATIONS = 150  # of the loss, until a head is fitted for all strengths of its penalty
_READ = 64  # images that are read to see how long it takes
_FITTED = 2048  # images of noise that a head is fitted to for the same
_STEPS = 3  # that are timed at each of two sides, after one that is not
FASTER = 0.9  # of the time is what another layout of images must take
FASTER_BF16 = 0.75  # the same for bfloat16, which rounds more


@dataclass(frozen=True)
class Pace:
    """Seconds that training takes for one image: `fixed`, and `by_area` for each pixel of it."""

    fixed: float
    by_area: float

    def seconds(self, side: int) -> float:
        """What an image of this size takes."""
        return self.fixed + self.by_area * side**2


@dataclass(frozen=True)
class Plan:
    """The recipe that was chosen, and about how many seconds it takes, with reading the images."""

    recipe: Recipe
    seconds: float
    tried: Mapping[float, float] = field(default_factory=dict)  # what val says of rates

    @property
    def text(self) -> str:
        """What was chosen, for people."""
        recipe = self.recipe
        minutes = f"about {self.seconds / 60:.1f} minutes"
        if not recipe.epochs:
            return f"a head alone at {recipe.frozen_side} px, since there is hardly time for more: {minutes}"
        first = "" if recipe.first_side is None else f", the first half of them at {recipe.first_side}"
        epochs = "1 epoch" if recipe.epochs == 1 else f"{recipe.epochs} epochs"
        frozen = "" if recipe.frozen_side is None else f"; a head alone at {recipe.frozen_side} px is the rival on val"
        numbers = ", in bfloat16" if recipe.autocast else ""
        rates = f"; of {len(self.tried)} rates {recipe.rate:g}, by val" if self.tried else ""
        return f"{epochs} at {recipe.side} px{first}{numbers}{rates}{frozen}: {minutes}"


def plan_minutes(
    base: Base,
    data: DomainData,
    method: Method,
    recipe: Recipe,
    minutes: float,
    tell: Callable[[str], None] = lambda found: None,
) -> Plan:
    """Time this machine for a few seconds, and choose sizes and epochs so that all takes about so many minutes.

    `tell` hears what is found where rates are tried, which takes longer.
    """
    began = time.perf_counter()
    if not 0 < minutes < float("inf"):
        raise TrainingError(f"minutes={minutes:g} must be more than 0")
    if recipe.train_on_val:
        raise TrainingError("with minutes, val decides on sizes, and train_on_val leaves none; leave one of them out")
    recipe = replace(recipe, least_steps=None)
    sides = sides_for(base, method.first_stage(), data)
    recipe = fastest_recipe(base, method.first_stage(), recipe, data.classes, sides[0])
    pace = measure_pace(base, method.first_stage(), recipe, data.classes, sides)
    once, fits_heads = seconds_to_read(data, base), data.target.kind == "classes" and base.feature_dim is not None
    if fits_heads:
        once += FITS * seconds_to_fit(len(data.train), base.feature_dim or 0, len(data.classes))
    left = 60 * minutes - once - (time.perf_counter() - began)
    plan = plan_for(recipe, pace, sides, len(data.train), len(data.val), left, alone=fits_heads)
    if not fits_heads:
        plan = replace(plan, recipe=replace(plan.recipe, frozen_side=None))
    side = side_of_trials(recipe, plan, pace, sides, data, MARGIN * left - plan.seconds)
    if side and not method.takes_sources:  # whose trials would lack the masks of other domains
        plan = with_best_rate(base, data, method, plan, side, tell)
        plan = replace(plan, seconds=plan.seconds + _seconds_of_trials(pace, side, data))
    return replace(plan, seconds=plan.seconds + once)


def sides_for(base: Base, method: Method, data: DomainData) -> list[int]:
    """The sides that are considered: from a quarter of the base's own up to it, where the network takes them."""
    domain = new_domain(base, method, data.classes, target=data.target).to(base.device)
    smaller = [side for side in SIDES if base.input.side / 4 <= side < base.input.side]
    return [*(side for side in smaller if takes(base, domain, base.input.at(side))), base.input.side]


def seconds_to_read(data: DomainData, base: Base) -> float:
    """What decoding all images takes, by a few of them; twice, since the sizes at test are decoded again."""
    images = len(data.train) + len(data.val)
    few = np.linspace(0, len(data.train) - 1, min(_READ, len(data.train))).astype(np.int64)
    began = time.perf_counter()
    cache_splits([SubsetSplit(data.train, few)], shrink_of(replace(base.input, squash=data.squash)))
    return 2 * images * (time.perf_counter() - began) / len(few)


def seconds_to_fit(images: int, features: int, classes: int) -> float:
    """What the logistic regression of a head takes, by some evaluations of its loss on noise."""
    few = min(images, _FITTED)
    seen, labels = torch.randn(few, features), torch.arange(few) % classes
    weight = torch.zeros(classes, features, requires_grad=True)
    seconds = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        cross_entropy(seen @ weight.T, labels).backward()  # type: ignore[no-untyped-call]
        seconds.append(time.perf_counter() - began)
    most = len(STRENGTHS) * WORK // (images * features * classes)
    return max(1, min(EVALUATIONS, most)) * median(seconds) * images / few


def fastest_recipe(base: Base, method: Method, recipe: Recipe, classes: Sequence[str], side: int) -> Recipe:
    """The recipe with the layout of images and the type of numbers whose steps are clearly fastest, by timing some."""

    def seconds(tried: Recipe, most: float) -> float:
        with torch.random.fork_rng():
            return _timed(_learner(base, method, tried, classes), base, side, most)

    plain = replace(recipe, autocast=False)
    chosen = faster(plain, replace(plain, channels_last=not recipe.channels_last), FASTER, seconds)
    return faster(chosen, replace(chosen, autocast=True), FASTER_BF16, seconds)


def faster(recipe: Recipe, other: Recipe, share: float, seconds: Callable[[Recipe, float], float]) -> Recipe:
    """`other` where its steps take less than this share of the time of `recipe`'s; `seconds` may stop at a bound."""
    bound = share * seconds(recipe, inf)
    return other if seconds(other, bound) < bound else recipe


def measure_pace(base: Base, method: Method, recipe: Recipe, classes: Sequence[str], sides: Sequence[int]) -> Pace:
    """Time some steps of training at the smallest of `sides` and a larger one, on images of noise."""
    small, large = sides[0], sides[len(sides) // 2]
    with torch.random.fork_rng():
        learner = _learner(base, method, recipe, classes)
        per_image = {side: _timed(learner, base, side) / recipe.batch_size for side in dict.fromkeys((small, large))}
    if small == large:
        return Pace(0.0, per_image[small] / small**2)
    by_area = max(0.0, (per_image[large] - per_image[small]) / (large**2 - small**2))
    return Pace(max(0.0, per_image[small] - by_area * small**2), by_area)


def _learner(base: Base, method: Method, recipe: Recipe, classes: Sequence[str]) -> DomainLearner:
    learner = DomainLearner(base, new_domain(base, method, classes).to(base.device), recipe)
    learner.begin_epoch()
    return learner


def _timed(learner: DomainLearner, base: Base, side: int, most: float = inf) -> float:
    """Seconds of a step at this side: the median of a few; of fewer, where one takes twice as long as `most`."""
    shape = base.input.at(side).shape
    images = torch.randn(learner.recipe.batch_size, *shape)
    labels = torch.arange(len(images)) % len(learner.domain.classes or [""])
    seconds: list[float] = []
    while len(seconds) <= _STEPS and (len(seconds) < 2 or seconds[-1] <= 2 * most):
        began = time.perf_counter()
        learner.step(images, labels, 0.5)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def plan_for(
    recipe: Recipe, pace: Pace, sides: Sequence[int], images: int, val: int, seconds: float, *, alone: bool = False
) -> Plan:
    """The recipe with size and epochs for `images` to learn from and `val` to measure on, in so many seconds.

    Of the sides the largest with which every image is seen `OFTEN` times, else the smallest; then as many epochs as
    there is time for, from 1 to `MOST_EPOCHS`. With `alone` a head alone takes the place of fewer than `FEW` epochs.
    """
    time_left = MARGIN * seconds
    plans = [_at_side(recipe, pace, sides, place, images, val, time_left) for place in range(len(sides))]
    often = [plan for plan in plans if plan.recipe.epochs >= OFTEN and plan.seconds <= time_left]
    chosen = often[-1] if often else plans[0]
    if not alone or (chosen.recipe.epochs >= FEW and chosen.seconds <= time_left):
        return chosen
    return _head_alone(recipe, pace, sides, images + val, time_left)


def side_of_trials(
    recipe: Recipe, plan: Plan, pace: Pace, sides: Sequence[int], data: DomainData, seconds: float
) -> int | None:
    """The largest side at which all rates can be tried in so many seconds; None where there is no such.

    Only time that training cannot use is left for it: all epochs, and the largest images. A rate that is not the
    recipe's usual one was asked for, and stays.
    """
    usual = RECIPES.get(recipe.name)
    if usual is None or (recipe.rate, recipe.weight_rate) != (usual.rate, usual.weight_rate):
        return None
    if plan.recipe.epochs < MOST_EPOCHS or plan.recipe.side != sides[-1]:
        return None
    return max((side for side in sides if _seconds_of_trials(pace, side, data) <= seconds), default=None)


def _seconds_of_trials(pace: Pace, side: int, data: DomainData) -> float:
    epoch = (len(data.train) + MEASURING * len(data.val)) * pace.seconds(side)
    return len(FACTORS) * (SHORT + MEASURING) * epoch  # and a pass for the head that is fitted again


def with_best_rate(
    base: Base, data: DomainData, method: Method, plan: Plan, side: int, tell: Callable[[str], None]
) -> Plan:
    """The plan with the rate that is best on val after a short training at this side.

    Another rate than the recipe's must be better by more than chance. All rates move together, but for the head's.
    """
    sizes: dict[str, Any] = {"epochs": SHORT, "side": side, "first_side": None, "test_side": None, "frozen_side": None}
    sets = make_loaders(data, base.input, replace(plan.recipe, **sizes))
    best: tuple[Recipe, Reached] | None = None
    tried = {}
    for recipe in (at_rate(plan.recipe, factor) for factor in FACTORS):
        with torch.random.fork_rng():
            domain = new_domain(base, method.at_rate(recipe.rate), data.classes, target=data.target).to(base.device)
            fit(base, domain, sets.train, sets.val, replace(recipe, **sizes))
        reached = measured_at(base, domain, data.val, domain.input)
        tell(f"rate {recipe.rate:g} for {SHORT} epochs at {side} px: val {domain.target.text(reached.value)}")
        tried[recipe.rate] = reached.value
        if best is None or clearly_better(domain, reached, best[1]):
            best = recipe, reached
    return plan if best is None else replace(plan, recipe=best[0], tried=tried)


def at_rate(recipe: Recipe, factor: float) -> Recipe:
    """The recipe with all rates but the head's times a factor."""
    rates: dict[str, Any] = {n: getattr(recipe, n) for n in RATES if n != "head_rate" and getattr(recipe, n)}
    rates = {name: float(f"{value * factor:.3g}") for name, value in rates.items()}
    return replace(recipe, **rates)


def _head_alone(recipe: Recipe, pace: Pace, sides: Sequence[int], images: int, seconds: float) -> Plan:
    """No training: a head of frozen features, at the largest side that there is time for."""
    side = _frozen_side(pace, sides, images, seconds, ALONE)
    sizes: dict[str, Any] = {"side": side, "first_side": None, "test_side": None, "frozen_side": side, "resized": None}
    return Plan(replace(recipe, name="minutes", epochs=0, **sizes), images * MEASURING * pace.seconds(side))


def _at_side(
    recipe: Recipe, pace: Pace, sides: Sequence[int], place: int, images: int, val: int, seconds: float
) -> Plan:
    """As many epochs as there is time for at one of the sides."""
    side = sides[place]
    first = max((one for one in sides if one <= SMALLER * side), default=None)
    frozen = _frozen_side(pace, sides, images + val, seconds, FROZEN)
    once = (images + val) * MEASURING * pace.seconds(frozen)
    once += (images + val) * MEASURING * pace.seconds(side)  # the head is fitted again, here and at larger sizes
    once += (images + val) * MEASURING * sum(pace.seconds(round(factor * side)) for factor in TRIED[:CLIMBED])
    if recipe.refit_on_val:
        once += (images + val) * MEASURING * pace.seconds(side)
    epoch = images * (pace.seconds(first or side) + pace.seconds(side)) / 2 + val * MEASURING * pace.seconds(side)
    epochs = max(1, min(MOST_EPOCHS, int((seconds - once) / epoch)))
    first = first if epochs > 1 else None
    sizes: dict[str, Any] = {"side": side, "first_side": first, "test_side": "auto", "frozen_side": frozen}
    if recipe.refit is None:
        sizes["refit"] = "auto"
    return Plan(replace(recipe, name="minutes", epochs=epochs, resized=None, **sizes), once + epochs * epoch)


def _frozen_side(pace: Pace, sides: Sequence[int], images: int, seconds: float, share: float) -> int:
    """The largest side at which one pass takes at most a share of the time; the smallest where none does."""
    cheap = [side for side in sides if images * MEASURING * pace.seconds(side) <= share * seconds]
    return max(cheap, default=sides[0])
