"""From images to a trained domain in one call."""

import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from polymask.core.accounting import bits_per_weight, in_halves
from polymask.core.base import Base
from polymask.core.domain import START, Domain
from polymask.core.input import InputSpec
from polymask.core.method import Method
from polymask.core.registry import new_domain
from polymask.core.target import CLASSES, Target
from polymask.data.batches import Batches, as_batches, parts_of
from polymask.data.cache import cache_domain
from polymask.data.images import DomainData, looks_of
from polymask.data.load import load_data
from polymask.data.loader import Loader, loader_at
from polymask.data.preprocess import eval_transform, train_transform
from polymask.data.sets import is_map_style, open_sets
from polymask.errors import MethodError, TrainingError
from polymask.train.evaluation import Evaluation
from polymask.train.fit import Listener, Together, fit
from polymask.train.learner import EpochRecord
from polymask.train.predict import evaluate, evaluate_in_detail, likeness_note, measured_batches
from polymask.train.recipe import Recipe, get_recipe, method_by, seeds_note
from polymask.train.regression import LastHead, Seen, fit_last_head, learn_head
from polymask.train.rounding import round_numbers
from polymask.train.sizing import Fed, choose_test_input, measured_at, takes, way_of
from polymask.train.state import epochs_until_stalled
from polymask.train.unknown import VAL_LOOKS, calibrate_on, calibrate_seen, can_calibrate, evenly

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polymask.train.ranks import Ranks


@dataclass(frozen=True)
class Loaders:
    """Batches of a domain's splits; `val` is None where training takes it all."""

    train: Loader
    val: Loader | None
    test: Loader | None


@dataclass(frozen=True, repr=False)
class Learned:
    """A trained domain in its stored form, with what was measured; accuracies in percent.

    For other targets than classes `test_accuracy` is what `domain.target` is measured by.
    """

    domain: Domain
    history: list[EpochRecord]
    test_accuracy: float | None
    evaluation: Evaluation | None = None  # on test
    val_evaluation: Evaluation | None = None  # without test: on val, before the last head learned from it

    def __repr__(self) -> str:
        target, metrics, val, test = self.domain.target, self.domain.metrics, "", ""
        if (best := metrics.get(f"val_{target.metric}")) is not None:
            val = f", {target.text(best)} on val in epoch {metrics['kept_epoch']}"
        if self.test_accuracy is not None:
            test = f", {target.text(self.test_accuracy)} on test"
        what = f"{self.domain.method.name} on {self.domain.base_name}, {len(self.domain.classes or [])} {target.kind}"
        return f"Learned({what}: {len(self.history)} epochs{val}{test})"

    def plot(self) -> "Figure":
        """Loss, and accuracy or what else the target is measured by, as a figure of matplotlib (extra `plot`)."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise TrainingError(f"a plot needs matplotlib ({error}); pip install 'polymask[plot]'") from error

        class Curves(Figure):
            """A figure that a notebook shows, whatever matplotlib's backend."""

            def _repr_png_(self) -> bytes:
                file = io.BytesIO()
                self.savefig(file, format="png")
                return file.getvalue()

        figure = Curves(figsize=(9, 3.2), layout="constrained")
        losses, accuracies = figure.subplots(1, 2)
        epochs = [record.epoch + 1 for record in self.history]
        losses.plot(epochs, [record.loss for record in self.history], marker="o")
        losses.set(xlabel="epoch", ylabel="training loss")
        accuracies.plot(epochs, [record.train_accuracy for record in self.history], marker="o", label="train")
        validated = [(r.epoch + 1, r.val_accuracy) for r in self.history if r.val_accuracy is not None]
        if validated:
            accuracies.plot(*zip(*validated, strict=True), marker="s", label="val")
        if self.test_accuracy is not None:
            accuracies.axhline(self.test_accuracy, color="0.4", linestyle="--", label="test")
        target = self.domain.target
        accuracies.set(xlabel="epoch", ylabel=", ".join(filter(None, [target.title, target.unit.strip()])))
        accuracies.legend()
        for axes in (losses, accuracies):
            axes.xaxis.get_major_locator().set_params(integer=True)
        return figure

    @property
    def at_chance(self) -> bool:
        """Whether the last epoch did no better than guessing: loss log C, accuracy 1 / C.

        So ends a training whose rate was too high: the same features for every image.
        """
        count = len(self.domain.classes or [])
        if count < 2 or not self.history or self.domain.target.kind != "classes":
            return False
        last, val = self.history[-1], self.domain.metrics.get("val_accuracy")
        if val is not None and val > 150 / count:  # the head may be another since
            return False
        return last.loss > 0.99 * math.log(count) and last.train_accuracy < 150 / count


def learn(
    base: Base,
    data: Any,
    method: str | Method = "affine-centred",
    recipe: str | Recipe = "standard",
    *,
    classes: Sequence[str] | None = None,
    minutes: float | None = None,
    progress: bool | None = None,
    loaders: Loaders | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    ranks: "Ranks | None" = None,
    sources: Mapping[str, Domain] | None = None,
    start: Domain | None = None,
    or_base: bool = False,
    until: float | None = None,
    **options: Any,
) -> Learned:
    """Teach `base` a domain and measure it on test.

    `data` is what `load_data` takes or gives, or what gives (image, label): a DataLoader, a Dataset, a Hugging Face
    dataset, or a dict or tuple of these for train, val and test; `classes` names the classes where such data does not.
    With `minutes` sizes and epochs are chosen so that all of it takes about so long on this machine (see
    `polymask.train.minutes`); no larger size at test is tried when they are over, or after `until`, a time of
    `time.perf_counter`. `progress` shows how it goes on standard error; None does where people watch and no
    `listener` is given: in a terminal or a notebook. `options` are the method's. `loaders` saves decoding again what
    several methods share. With `ranks` (see `polymask.train.ranks`) several processes share the work. `sources` are
    domains, by name, whose masks `affine-cross` and `affine-mix` draw on. The domain begins as `start` is, in place of
    as the base; for these two methods that is one of the sources. With `or_base` it learns from both beginnings, and
    what val says is better is kept.
    """
    recipe = get_recipe(recipe)
    method = _asked_method(method, recipe, sources, options)
    if isinstance(data, str | Path):
        data = load_data(data, seed=seed)
    elif not isinstance(data, DomainData):
        data = open_sets(parts_of(data), classes, seed)
    if isinstance(data, DomainData):
        data.check_enough()
    target = data.target if isinstance(data, DomainData) else CLASSES
    leads = ranks is None or ranks.first
    watched = leads and (progress or (progress is None and listener is None and _people_watch()))
    if watched:
        listener = _shown(data.name, target, listener, asked=bool(progress))
    if minutes is not None:
        until = time.perf_counter() + 60 * minutes
        recipe = _planned(base, data, method, recipe, minutes, loaders)
        method = method.at_rate(recipe.rate)
    recipe = recipe.for_images(images_of_epoch(data, recipe, loaders))
    sets: Any = loaders or data
    if loaders is None and isinstance(data, DomainData):
        with _reading(watched) as count:
            sets = make_loaders(data, base.input, recipe, seed=seed, progress=count)
    torch.manual_seed(seed)
    _check_ending(base, recipe, data, target)
    if start is not None and not recipe.epochs:
        raise TrainingError("a head alone begins as nothing; give epochs, or more minutes, or leave start out")
    if or_base and (start is None or minutes is not None or sets.val is None):
        raise TrainingError("or_base compares two trainings on val: it needs start and val, and no minutes")
    for source in (sources or {}).values():
        source.check_base(base)
    found: list[_Found] = []
    if recipe.epochs:
        how: dict[str, Any] = {"resume": resume, "listener": listener, "ranks": ranks, "until": until, "seed": seed}
        for begin in [None, start] if or_base else [start]:
            torch.manual_seed(seed)
            domain = new_domain(base, method, data.classes, target=target)
            method.draw_on(domain, list((sources or {}).values()))
            if begin is not None:
                from polymask.core.starting import begin_as

                begin_as(domain, begin, recipe.rate)
            own = second_checkpoint(checkpoint) if found and checkpoint is not None else checkpoint
            found.append(_trained(base, domain.to(base.device), data, sets, recipe, checkpoint=own, **how))
    if recipe.frozen_side is not None:
        found.append(_head_alone(base, data, recipe, None if recipe.epochs else listener))
    learned = _settled(base, data, sets, recipe, _better(found, target), seed=seed, ranks=ranks)
    if or_base:
        learned.domain.metrics["val_by_start"] = {"base": found[0].best, "start": found[1].best}
    return learned


def second_checkpoint(path: Path) -> Path:
    """Where the second of two trainings keeps its state, beside the first."""
    return path.with_name(f"start-{path.name}")


def _settled(
    base: Base, data: Any, sets: Any, recipe: Recipe, found: "_Found", *, seed: int, ranks: "Ranks | None"
) -> Learned:
    """What follows when it has learned: the last head, numbers of 16 bits, a rule for unknown images, and test."""
    domain, history, sides, best, seen = found
    decoded, target = isinstance(data, DomainData), domain.target
    last = fit_last_head(base, domain, data, recipe, seen) if decoded else None
    if last is not None:
        best, seen = last.reached, (last.train, last.val)
    if ranks is not None:
        best = ranks.settle(domain, best)
    if decoded and domain.input != recipe.input(base.input, squash=data.squash):
        parts = ("val", "test") if seen is not None else ("train", "val", "test")
        there = [part for part in parts if getattr(sets, part) is not None]
        sets = replace(sets, **{part: loader_at(data.splits()[part], domain.input) for part in there})
    rounded = False
    if recipe.precision != 32:
        known = best if recipe.selection == "best" and len(domain.method.stages) == 1 else None
        rounded, after = round_numbers(base, domain, sets.val, known, ranks)
        best = best if after is None else after
    if ranks is None or ranks.first:
        _keep_rule(base, domain, sets, seen)
    on_val = None if last is None else _learned_from_val(base, domain, sets, last, halves=rounded)
    if ranks is not None:
        ranks.settle(domain, best)
    result, evaluation = _measured_on_test(base, domain, sets.test, ranks)
    begun = {START: domain.recipe[START]} if START in domain.recipe else {}
    seeds = seeds_note(seed, data.seed if decoded else None)
    domain.recipe = recipe.to_json() | seeds | {"data": data.name} | begun
    if decoded:
        domain.recipe |= likeness_note(base, data.train)
        domain.recipe |= {VAL_LOOKS: looks_of(data.val)} if last is not None else {}
    measured: dict[str, Any] = {f"val_{target.metric}": best, f"test_{target.metric}": result}
    measured |= {"bits_per_weight": bits_per_weight(base, domain), "precision": 16 if rounded else 32}
    domain.metrics = measured | {"kept_epoch": _kept_epoch(domain.method, recipe, history, target)}
    domain.metrics |= {"val_by_test_side": sides} if sides else {}
    domain.metrics |= {"learned_from_val": True} if last is not None else {}
    return Learned(domain, history, result, evaluation, on_val)


def _asked_method(
    method: str | Method, recipe: Recipe, sources: Mapping[str, Domain] | None, options: dict[str, Any]
) -> Method:
    """The method with what recipe, options and sources decide; raise where it is not for one domain by itself."""
    if isinstance(method, str):
        method = method_by(recipe, method, **options)
    elif options:
        raise MethodError(f"{', '.join(options)} cannot be changed in a {type(method).__name__}; make it with them")
    method = method.at_rate(recipe.rate)
    if sources:
        method = method.drawing_on(sources)
    elif method.takes_sources:
        raise MethodError(
            f"{method.name} draws on masks of other domains; give sources, or take affine-full or bn-only"
        )
    method.check_own(False)  # these are one domain's images
    method.check_alone()
    return method


class _Found(NamedTuple):
    """A domain that has learned, what each size at test gives, and the best result on val."""

    domain: Domain
    history: list[EpochRecord]
    sides: dict[str, float]
    best: float | None
    seen: tuple[Seen, Seen] | None = None  # of train and val, as it is fed


def _trained(
    base: Base,
    domain: Domain,
    data: Any,
    sets: Any,
    recipe: Recipe,
    *,
    listener: Listener | None,
    ranks: "Ranks | None",
    until: float | None,
    **how: Any,
) -> _Found:
    """Fit a new domain, and choose its size at test where the recipe asks for it."""
    decoded = isinstance(data, DomainData)
    if decoded:
        domain.input = recipe.input(base.input, squash=data.squash)
    history = fit(base, domain, sets.train, sets.val, recipe, listener=listener, ranks=ranks, **how)
    tell = (listener or Listener()).fed
    fed = choose_test_input(base, domain, data, recipe, tell, until) if decoded else Fed(domain.input, {})
    domain.input = fed.input
    best: float | None
    if fed.found:
        best = fed.found[way_of(fed.input)]
    elif decoded and sets.val is not None and fed.input != recipe.input(base.input, squash=data.squash):
        best = measured_at(base, domain, data.val, fed.input).value
    elif recipe.refit is None and recipe.selection == "best" and len(domain.method.stages) == 1:
        best = domain.target.best(record.val_accuracy for record in history)
    else:
        best = None if sets.val is None else evaluate(base, domain, sets.val)
    return _Found(domain, history, fed.found, best, fed.seen)


def _head_alone(base: Base, data: DomainData, recipe: Recipe, listener: Listener | None) -> _Found:
    """A head on the frozen base, which is an epoch of its own to the listener."""
    assert recipe.frozen_side is not None
    listener, began = listener or Listener(), time.perf_counter()
    listener.begin(replace(recipe, epochs=1), 1, 0)
    try:
        alone = learn_head(base, data, recipe.frozen_side, balanced=recipe.balance is not None)
        listener.epoch(alone.record, time.perf_counter() - began)
    finally:
        listener.end()
    return _Found(alone.domain, [alone.record], {}, alone.record.val_accuracy, (alone.train, alone.val))


def _better(found: Sequence[_Found], target: Target) -> _Found:
    """What is best on val; of equals the first, and what val says nothing of comes last."""
    best = found[0]
    for other in found[1:]:
        if best.best is None or target.better(other.best or 0.0, best.best):
            best = other
    return best


def _measured_on_test(
    base: Base, domain: Domain, test: Any, ranks: "Ranks | None"
) -> tuple[float | None, Evaluation | None]:
    """What the target is measured by, and for classes all that is known of them; nothing without test images."""
    if test is None:
        return None, None
    if domain.target.kind != "classes":
        return (evaluate if ranks is None else ranks.evaluate)(base, domain, test), None
    measure = evaluate_in_detail if ranks is None else ranks.evaluate_in_detail
    evaluation = measure(base, domain, measured_batches(domain, test))
    return evaluation.accuracy, evaluation


def _keep_rule(base: Base, domain: Domain, sets: Any, seen: tuple[Seen, Seen] | None) -> None:
    """Keep what tells unknown images, where val says how; see `polymask.train.unknown`."""
    if sets.val is None:
        return
    train, val = (as_batches(part, domain.input, domain.classes) for part in (sets.train, sets.val))
    if not can_calibrate(base, domain, val):
        return
    if seen is not None:
        calibrate_seen(base, domain, *seen)
    else:
        calibrate_on(base, domain, evenly(train, val), val)


def _learned_from_val(base: Base, domain: Domain, sets: Any, last: LastHead, *, halves: bool) -> Evaluation | None:
    """Let the head learn from val; without test images val is evaluated before, since it can say nothing after that."""
    seen = None if sets.test is not None else evaluate_in_detail(base, domain, measured_batches(domain, sets.val))
    last.add_val(domain)
    domain.restore(in_halves(domain) if halves else domain.stored())
    return seen


def _planned(base: Base, data: Any, method: Method, recipe: Recipe, minutes: float, loaders: Loaders | None) -> Recipe:
    from polymask.train.minutes import plan_minutes

    if loaders is not None or not isinstance(data, DomainData):
        raise TrainingError("minutes need images that are decoded here; give a folder, or what load_data gives")
    return plan_minutes(base, data, method, recipe, minutes).recipe


def _check_ending(base: Base, recipe: Recipe, data: Any, target: Target) -> None:
    """Raise where the recipe asks for what cannot be had once a domain has learned: other sizes, or another head."""
    if isinstance(recipe.refit, int | float) and target.kind != "classes":
        raise TrainingError(
            f"refit={recipe.refit:g} is for classes, and this is a domain of {target.kind}; leave it out"
        )
    for field in ("test_side", "frozen_side"):
        if getattr(recipe, field) in (None, "auto"):  # auto: where it can be
            continue
        if not isinstance(data, DomainData):
            raise TrainingError(f"{field} needs images that are decoded here; give a folder, or what load_data gives")
        if field == "frozen_side" and (recipe.train_on_val or data.target.kind != "classes"):
            raise TrainingError("frozen_side is for classes, and val decides on it; leave it or train_on_val out")
        spec = base.input.at(int(getattr(recipe, field)))
        if not takes(base, new_domain(base, "bn-only", data.classes, target=data.target).to(base.device), spec):
            raise TrainingError(f"{base.name} does not take images of {spec.size}; leave {field}={spec.side} out")


def _kept_epoch(method: Method, recipe: Recipe, history: Sequence[EpochRecord], target: Target) -> int:
    """The epoch, counted from 1, that the domain is of: the last stage's best on val, or its last."""
    if recipe.selection == "last" or history[-1].val_accuracy is None:
        return len(history)
    last = last_stage(method, recipe, history, target)
    return len(history) - len(last) + last.index(target.best(last)) + 1


def last_stage(method: Method, recipe: Recipe, history: Sequence[EpochRecord], target: Target) -> list[float | None]:
    """What val says of the epochs of the last stage, the one whose domain is kept."""
    results = [record.val_accuracy for record in history]
    begin, before = 0, 0.0
    for stage in method.stages[:-1]:
        of_stage = results[begin : begin + recipe.stage(before, *stage).epochs]
        begin, before = begin + epochs_until_stalled(of_stage, target, recipe.patience), before + stage.share
    return results[begin:] or results


def _people_watch() -> bool:
    """Whether what is written to standard error is seen as it comes: in a terminal or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _shown(title: str, target: Target, listener: Listener | None, *, asked: bool) -> Listener | None:
    """The listener, and one that shows how training goes, where rich is there to do it."""
    try:
        from polymask.train.progress import LiveProgress
    except ImportError as error:
        if asked:
            raise TrainingError(f"progress needs rich ({error}); pip install 'polymask[cli]'") from error
        return listener
    live = LiveProgress(title, target=target)
    return live if listener is None else Together(live, listener)


@contextmanager
def _reading(shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """What is told how many images have been read; None where nobody looks."""
    if not shown or find_spec("rich") is None:
        yield None
        return
    from polymask.train.progress import reading_bar

    with reading_bar() as count:
        yield count


def images_of_epoch(data: Any, recipe: Recipe, loaders: Loaders | None = None) -> int | None:
    """How many images an epoch has, a last batch counted as whole; None where nobody knows."""
    if isinstance(data, DomainData) and loaders is None:
        return len(data.train) + (len(data.val) if recipe.train_on_val else 0)
    train = data.train if loaders is None else loaders.train
    if isinstance(train, Batches) or (isinstance(train, DataLoader) and is_map_style(train.dataset)):
        return len(train) * recipe.batch_size
    return len(train) if is_map_style(train) else None


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
    data.target.check_balance(recipe.balance)
    spec = recipe.input(base_input, squash=data.squash)
    if recipe.mirror is not None:
        data = replace(data, mirror=recipe.mirror)
    caches = cache_domain(data, spec, folder=cache, progress=progress)
    augment, centre = train_transform(data, spec, scale=recipe.random_scale), eval_transform(data, spec)
    early = None
    if recipe.first_side is not None:
        early = train_transform(data, spec.at(recipe.first_side), scale=recipe.random_scale), recipe.epochs // 2
    images = caches.train_val if recipe.train_on_val else caches.train
    sampler = recipe.balance == "sampler"
    train = Loader(
        images, augment, batch_size=recipe.batch_size, seed=seed, shuffle=True, balanced=sampler, early=early
    )
    val = None if recipe.train_on_val else Loader(caches.val, centre, batch_size=64)
    many = eval_transform(data, spec, crops=crops)
    test = None if caches.test is None else Loader(caches.test, many, batch_size=64)
    return Loaders(train, val, test)
