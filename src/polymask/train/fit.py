"""Training a domain: one loop for every method, and nothing in it names one."""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

import torch

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.input import InputSpec
from polymask.core.parts import Objective, Objectives
from polymask.core.registry import create_method
from polymask.core.target import Target
from polymask.data.batches import Adapted, Batches, as_batches, parts_of
from polymask.data.images import may_mirror
from polymask.data.loader import Loader
from polymask.data.preprocess import augmenting
from polymask.data.sets import title_of
from polymask.errors import LostProcess, NotFinite, TrainingError
from polymask.train.descent import begin_head
from polymask.train.learner import DomainLearner, EpochRecord, JointLearner, Learner, Rounds, as_later, placed_batches
from polymask.train.predict import all_labels
from polymask.train.recipe import Recipe, get_recipe
from polymask.train.regression import refit_head
from polymask.train.state import Run, copied, domain_identity, images_identity

if TYPE_CHECKING:
    from polymask.train.ranks import Ranks

Stop = threading.Event  # set: training is to save and end


class Listener:
    """What wants to know how training goes; each call does nothing unless overridden."""

    def begin(self, recipe: Recipe, steps: int, epoch: int) -> None:
        """Training begins at `epoch`, with so many steps an epoch."""

    def step(self, epoch: int, step: int, loss: float, images: int, density: float | None) -> None:
        """One step is done; `density` (the share of ones in the masks) comes now and then."""

    def epoch(self, record: EpochRecord, seconds: float) -> None:
        """One epoch is done."""

    def stopped(self, why: str) -> None:
        """No more epochs come, though the recipe has more."""

    def fed(self, way: str, value: float) -> None:
        """After training, another way to feed the images was tried; what it gives on val."""

    def end(self) -> None:
        """Training is over, or was cut."""


class Together(Listener):
    """Several listeners as one."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners

    def begin(self, recipe: Recipe, steps: int, epoch: int) -> None:
        for listener in self.listeners:
            listener.begin(recipe, steps, epoch)

    def step(self, epoch: int, step: int, loss: float, images: int, density: float | None) -> None:
        for listener in self.listeners:
            listener.step(epoch, step, loss, images, density)

    def epoch(self, record: EpochRecord, seconds: float) -> None:
        for listener in self.listeners:
            listener.epoch(record, seconds)

    def stopped(self, why: str) -> None:
        for listener in self.listeners:
            listener.stopped(why)

    def fed(self, way: str, value: float) -> None:
        for listener in self.listeners:
            listener.fed(way, value)

    def end(self) -> None:
        for listener in self.listeners:
            listener.end()


def fit(
    base: Base,
    domain: Domain,
    train: Any,
    val: Any = None,
    recipe: str | Recipe = "quick",
    *,
    seed: int = 0,
    checkpoint: Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    ranks: "Ranks | None" = None,
    also: Objective | None = None,
) -> list[EpochRecord]:
    """Train a domain, then turn it into its stored form: the best epoch on val, or the last.

    `train` and `val` give (image, label): batches of `make_loaders`, a DataLoader, a Dataset or a Hugging Face dataset;
    `train` may also be a dict or tuple of both. The domain's `input` becomes that of the training images.
    With `checkpoint` the state is written there after every epoch and when a signal asks to stop;
    `resume` goes on from it, to the same result to the bit that an undisturbed run gives.
    With `ranks` (see `polymask.train.ranks`) several processes share every batch. `also` is added to the loss, beside
    what the method adds.
    """
    recipe = get_recipe(recipe)
    if not recipe.epochs:
        raise TrainingError("epochs=0 leaves nothing to train; give some, or use learn, which then fits a head alone")
    parts = {"val": val} | parts_of(train)
    require_val(recipe, parts["val"])
    listener = listener or Listener()
    train, domain.input = training_batches(parts["train"], domain.input, domain.classes, recipe, seed, resume=resume)
    val = None if parts["val"] is None else as_batches(parts["val"], domain.input, domain.classes)
    torch.manual_seed(seed)
    domain.target = fitted_target(domain, train, recipe)
    images = partial(placed_batches, train, base, recipe)
    later = partial(placed_batches, as_later(train), base, recipe)
    if recipe.head_start == "centred":
        with seeded(seed):
            begin_head(base, domain, images())
    run = Run(domain_identity(domain, recipe, seed) | images_identity(train), checkpoint, resume=resume)
    if run.saved is not None:
        if run.stage:
            domain.become(domain.rebuilt(base, create_method(domain.method.name, **run.saved["options"])))
        domain.load_state_dict(run.saved["domain"])
    with stop_signals() as stop:
        batches: Batches = train
        make_learner: Callable[..., Learner] = DomainLearner
        if ranks is not None:
            session = ranks.session(train, val, run, stop)
            batches, make_learner, stop = session.shard, session.learner, session.stop
        while True:
            with seeded(seed):
                objective = domain.method.objective(base, domain, images)
            if also is not None:
                objective = also if objective is None else Objectives(objective, also)
            stages = domain.method.stages  # what a method adds beyond them is like the last
            before = sum(earlier.share for earlier in stages[: run.stage])
            stage = recipe.stage(before, *stages[min(run.stage, len(stages) - 1)])
            learner = make_learner(base, domain, stage, objective)
            run_epochs(learner, batches, val, run, listener, stop)
            domain.restore(run.best or copied(domain.stored()))
            with seeded(seed):
                following = domain.method.next_stage(base, domain, later)
            if following is None:
                break
            domain.become(following)
            run.begin_stage()

    if domain.method.norm_reestimate and val is None:
        domain.reestimate_norms(base, (batch for batch, _ in later()))
    refit_head(base, domain, train, val, recipe)
    return run.history


def training_batches(
    source: Any, spec: InputSpec, classes: Sequence[str] | None, recipe: Recipe, seed: int, *, resume: bool = False
) -> tuple[Batches, InputSpec]:
    """The batches that a recipe asks of a source, and how their images are fed: `spec` where they do not say it."""
    if isinstance(source, Batches):
        return source, source.spec if isinstance(source, Loader | Adapted) else spec
    if recipe.first_side is not None:
        raise TrainingError("first_side needs images that are decoded here; give a folder, or what load_data gives")
    wanted = recipe.input(spec) if len(spec.shape) == 3 else spec
    mirror = may_mirror(title_of(source)) if recipe.mirror is None else recipe.mirror
    batches = as_batches(
        source,
        wanted,
        classes,
        batch_size=recipe.batch_size,
        seed=seed,
        augment=partial(augmenting, wanted, mirror=mirror, scale=recipe.random_scale),
        resume=resume,
    )
    return batches, batches.spec if isinstance(batches, Loader | Adapted) else spec


def fit_joint(
    base: Base,
    domains: Sequence[Domain],
    trains: Sequence[Batches],
    vals: Sequence[Batches | None],
    recipe: Recipe,
    *,
    seed: int = 0,
    checkpoint: Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
) -> list[list[EpochRecord]]:
    """Train domains together, then turn each into its stored form; the history of each.

    The best epoch is that of the best mean accuracy on val. See `Rounds` for whose turn it is.
    """
    for val in vals:
        require_val(recipe, val)
    for domain, train in zip(domains, trains, strict=True):
        domain.target = fitted_target(domain, train, recipe)
        if domain.target.lower_is_better:
            raise TrainingError(f"domains of {domain.target.kind} cannot be learned together; learn each by itself")
    rounds = Rounds(trains)
    each = [
        domain_identity(domain, recipe, seed) | images_identity(train)
        for domain, train in zip(domains, trains, strict=True)
    ]
    if recipe.head_start == "centred":
        with seeded(seed):
            for domain, train in zip(domains, trains, strict=True):
                begin_head(base, domain, placed_batches(train, base, recipe))
    run = Run({"number of rounds": rounds.rounds, "domains": each}, checkpoint, resume=resume)
    torch.manual_seed(seed)
    with seeded(seed):
        learner = JointLearner(base, domains, rounds, vals, recipe)
    val = next((val for val in vals if val is not None), None)
    with stop_signals() as stop:
        run_epochs(learner, rounds, val, run, listener or Listener(), stop)
    learner.restore(run.best or copied(learner.stored()))
    if val is None:
        for domain, train in zip(domains, trains, strict=True):
            if domain.method.norm_reestimate:
                batches = placed_batches(as_later(train), base, recipe)
                domain.reestimate_norms(base, (batch for batch, _ in batches))
    for domain, train, its in zip(domains, trains, vals, strict=True):
        refit_head(base, domain, train, its, recipe)
    return learner.histories


def require_val(recipe: Recipe, val: Batches | None) -> None:
    """Raise where the best epoch on val is wanted and there is no val."""
    if recipe.selection == "best" and val is None:
        raise TrainingError("selection='best' needs val; give it, or set selection='last'")
    if recipe.patience is not None and val is None:
        raise TrainingError(f"patience={recipe.patience} needs val; give it, or leave patience out")


def fitted_target(domain: Domain, train: Batches, recipe: Recipe) -> Target:
    """A domain's target with what it takes from its training images."""
    if recipe.balance == "sampler" and not getattr(train, "balanced", False):
        raise TrainingError(
            "balance='sampler' is for batches that make_loaders made by the same recipe; balance others by 'weights'"
        )
    return domain.target.fitted(partial(all_labels, train), recipe.balance)


def run_epochs(learner: Learner, train: Batches, val: Batches | None, run: Run, listener: Listener, stop: Stop) -> None:
    """All epochs of a stage that are still to come, each with validation and a checkpoint."""
    recipe = learner.recipe
    run.restart(learner)
    before = run.epochs_before
    listener.begin(replace(recipe, epochs=before + recipe.epochs), len(train), before + run.epoch)
    try:
        while run.epoch < recipe.epochs and (best := run.stalled(learner)) is None:
            _train_epoch(learner, train, run, listener, stop)
            learner.end_epoch()
            if stop.is_set():
                run.interrupt(learner, "training was asked to stop")
            accuracy = None
            if val is not None:
                learner.settle(train, before + run.epoch)
                accuracy = learner.measure(val)
            run.finish_epoch(learner, accuracy)
            listener.epoch(run.history[-1], time.perf_counter() - run.began)
            run.save(learner)
        if run.epoch < recipe.epochs and best is not None:
            why = f"nothing was better on val since epoch {best + 1} (patience {recipe.patience})"
            listener.stopped(f"stopped after {run.epoch} of {recipe.epochs} epochs: {why}")
    except LostProcess as lost:
        run.interrupt(learner, str(lost))
    finally:
        listener.end()


def _train_epoch(learner: Learner, train: Batches, run: Run, listener: Listener, stop: Stop) -> None:
    """The rest of the current epoch, or what comes before a signal to stop."""
    recipe = learner.recipe
    learner.begin_epoch()
    run.began = time.perf_counter()
    epoch, steps = run.epochs_before + run.epoch, len(train)
    for images, labels in train.batches(epoch, run.step):
        if stop.is_set():
            return
        found = learner.step(images, labels, run.epoch + run.step / steps)
        if not math.isfinite(found.loss):
            raise NotFinite(
                f"the loss is {found.loss} in epoch {epoch + 1}, step {run.step + 1}; the rates are "
                f"{recipe.rate} and {recipe.head_rate}: try smaller ones, or look at the images"
            )
        run.step += 1
        run.add(found)
        density = learner.density() if run.step % 10 == 0 or run.step == steps else None
        listener.step(epoch, run.step, found.loss, found.images, density)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers that depend on nothing before; afterwards they go on as if unused."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM set the event; a second one acts as it would without us."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[signal.Signals, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    for name in (signal.SIGINT, signal.SIGTERM):
        before[name] = signal.signal(name, ask)
    try:
        yield stop
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


class EpochLog(Listener):
    """One JSON line for every epoch, after the whole lines that are in the file already."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path, self.header = path, header
        self.file: IO[str] | None = None

    def begin(self, recipe: Recipe, steps: int, epoch: int) -> None:
        self.file = self.path.open("a")
        written = self.path.read_bytes()
        self.file.truncate(written.rfind(b"\n") + 1)  # without a line that was cut when its process was killed
        self._write({"event": "begin", "epoch": epoch, "steps": steps} | self.header)

    def epoch(self, record: EpochRecord, seconds: float) -> None:
        self._write({"event": "epoch", "seconds": round(seconds, 3)} | asdict(record))

    def stopped(self, why: str) -> None:
        self._write({"event": "stopped", "why": why})

    def end(self) -> None:
        if self.file is not None:
            self.file.close()

    def _write(self, line: dict[str, Any]) -> None:
        assert self.file is not None
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
