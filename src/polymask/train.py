"""Training a domain: one loop for every method, and nothing in it names one."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from polymask.base import Base
from polymask.domain import Domain
from polymask.errors import InterruptedTraining, TrainingError
from polymask.learner import Learner
from polymask.predict import Batches, evaluate
from polymask.recipes import Recipe, get_recipe
from polymask.run import EpochRecord, Run, copied


class Listener:
    """What wants to know how training goes; each call does nothing unless overridden."""

    def begin(self, recipe: Recipe, steps: int, epoch: int) -> None:
        """Training begins at `epoch`, with so many steps an epoch."""

    def step(self, epoch: int, step: int, loss: float, images: int, density: float | None) -> None:
        """One step is done; `density` (the share of ones in the masks) comes now and then."""

    def epoch(self, record: EpochRecord, seconds: float) -> None:
        """One epoch is done."""

    def end(self) -> None:
        """Training is over, for whatever reason."""


def fit(
    base: Base,
    domain: Domain,
    train: Batches,
    val: Batches | None = None,
    recipe: str | Recipe = "quick",
    *,
    seed: int = 0,
    checkpoint: Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
) -> list[EpochRecord]:
    """Train a domain, then turn it into its stored form: the best epoch on val, or the last.

    With `checkpoint` the state is written there after every epoch and when a signal asks to stop;
    `resume` goes on from it, to the same result to the bit that an undisturbed run gives.
    """
    recipe = get_recipe(recipe)
    if recipe.selection == "best" and val is None:
        raise TrainingError("selection='best' needs val; give it, or set selection='last'")
    listener = listener or Listener()
    torch.manual_seed(seed)
    run = Run(domain, recipe, seed)
    if resume and checkpoint is not None and checkpoint.exists():
        run.load(checkpoint, base, domain)

    def images() -> Iterator[tuple[Tensor, Tensor]]:
        for batch, labels in train.batches(0):
            yield placed(batch, labels, base, recipe)

    with stop_signals() as stop:
        while True:
            with seeded(seed):
                objective = domain.method.objective(base, domain, images)
            learner = Learner(base, domain, recipe.stage(run.stage), objective)
            _fit_stage(learner, train, val, run, listener, stop, checkpoint)
            domain.restore(run.best or copied(domain.stored()))
            with seeded(seed):
                following = domain.method.next_stage(base, domain, images)
            if following is None:
                break
            domain.become(following)
            run.begin_stage()

    if domain.method.norm_reestimate and val is None:
        domain.reestimate_norms(base, (batch for batch, _ in images()))
    return run.history


def _fit_stage(
    learner: Learner,
    train: Batches,
    val: Batches | None,
    run: Run,
    listener: Listener,
    stop: threading.Event,
    checkpoint: Path | None,
) -> None:
    """All epochs of a stage that are still to come, each with validation and a checkpoint."""
    base, domain, recipe = learner.base, learner.domain, learner.recipe
    run.restart(learner)
    before = run.epochs_before
    listener.begin(replace(recipe, epochs=before + recipe.epochs), len(train), before + run.epoch)
    try:
        while run.epoch < recipe.epochs:
            _train_epoch(learner, train, run, listener, stop)
            if stop.is_set():
                _interrupt(checkpoint, run, learner)
            if val is not None and domain.method.norm_reestimate:
                batches = train.batches(before + run.epoch)
                domain.reestimate_norms(base, (images.to(base.device) for images, _ in batches))
            accuracy = None if val is None else evaluate(base, domain, val)
            run.finish_epoch(domain, accuracy, recipe)
            listener.epoch(run.history[-1], time.perf_counter() - run.began)
            if checkpoint is not None:
                run.save(checkpoint, learner)
    finally:
        listener.end()


def _train_epoch(
    learner: Learner, train: Batches, run: Run, listener: Listener, stop: threading.Event
) -> None:
    """The rest of the current epoch, or what comes before a signal to stop."""
    domain, recipe = learner.domain, learner.recipe
    domain.train()
    run.began = time.perf_counter()
    epoch, steps = run.epochs_before + run.epoch, len(train)
    for images, labels in train.batches(epoch, run.step):
        images, labels = placed(images, labels, learner.base, recipe)
        loss, logits = learner.step(images, labels, run.epoch + run.step / steps)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} in epoch {epoch}, step {run.step}; the rates are "
                f"{recipe.rate} and {recipe.head_rate}: try smaller ones, or look at the images"
            )
        run.step += 1
        run.add(loss, (logits.argmax(1) == labels).sum().item(), len(labels))
        often = run.step % 10 == 0 or run.step == steps
        density = mask_density(domain) if often else None
        listener.step(epoch, run.step, loss, len(labels), density)
        if stop.is_set():
            return


def mask_density(domain: Domain) -> float | None:
    """The share of ones in all masks of a domain; None where there are no masks."""
    ones = total = 0
    for _, transform in domain.named_transforms():
        mask = transform.mask()
        if mask is not None:
            ones, total = ones + int(mask.sum()), total + mask.numel()
    return ones / total if total else None


def placed(images: Tensor, labels: Tensor, base: Base, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """A batch where the base is, laid out as the recipe has it."""
    images, labels = images.to(base.device), labels.to(base.device)
    if recipe.channels_last and base.trains_channels_last and images.ndim == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, labels


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers that depend on nothing before; afterwards they go on as if unused."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _interrupt(checkpoint: Path | None, run: Run, learner: Learner) -> None:
    if checkpoint is None:
        raise InterruptedTraining("training was asked to stop; it had no checkpoint to save to")
    run.save(checkpoint, learner)
    raise InterruptedTraining(
        f"training was asked to stop and saved {checkpoint}; go on with --resume"
    )


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event; a second one acts as it would without us."""
    stop = threading.Event()
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
