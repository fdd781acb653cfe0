"""Training a domain: one loop for every method, and nothing in it names one."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from polymask.base import Base
from polymask.domain import Domain
from polymask.errors import InterruptedTraining, TrainingError
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
    optimisers = make_optimisers(domain, recipe)
    run = Run(domain, recipe, seed)
    if resume and checkpoint is not None and checkpoint.exists():
        run.load(checkpoint, domain, optimisers)

    with _stop_signals() as stop:
        listener.begin(recipe, len(train), run.epoch)
        try:
            while run.epoch < recipe.epochs:
                _train_epoch(base, domain, train, recipe, optimisers, run, listener, stop)
                if stop.is_set():
                    _interrupt(checkpoint, run, domain, optimisers)
                accuracy = None if val is None else evaluate(base, domain, val)
                run.finish_epoch(domain, accuracy, recipe)
                listener.epoch(run.history[-1], time.perf_counter() - run.began)
                if checkpoint is not None:
                    run.save(checkpoint, domain, optimisers)
        finally:
            listener.end()

    domain.restore(run.best or copied(domain.stored()))
    if domain.method.norm_reestimate:
        domain.reestimate_norms(base, (images for images, _ in train.batches(recipe.epochs)))
    return run.history


def _train_epoch(
    base: Base,
    domain: Domain,
    train: Batches,
    recipe: Recipe,
    optimisers: dict[str, Optimizer],
    run: Run,
    listener: Listener,
    stop: threading.Event,
) -> None:
    """The rest of the current epoch, or what comes before a signal to stop."""
    domain.train()
    run.began = time.perf_counter()
    steps = len(train)
    for images, labels in train.batches(run.epoch, run.step):
        set_rates(optimisers, recipe, run.epoch + run.step / steps)
        images, labels = _placed(images, labels, base, recipe)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=recipe.autocast):
            logits = domain(base, images)
            loss = F.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
        value = loss.item()
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss is {value} in epoch {run.epoch}, step {run.step}; the rates are "
                f"{recipe.rate} and {recipe.head_rate}: try smaller ones, or look at the images"
            )
        for optimiser in optimisers.values():
            optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimiser in optimisers.values():
            optimiser.step()
        run.step += 1
        run.add(value, (logits.argmax(1) == labels).sum().item(), len(labels))
        often = run.step % 10 == 0 or run.step == steps
        density = mask_density(domain) if often else None
        listener.step(run.epoch, run.step, value, len(labels), density)
        if stop.is_set():
            return


def make_optimisers(domain: Domain, recipe: Recipe) -> dict[str, Optimizer]:
    """Adam for transforms and norms and for whole weights, and the head's own."""
    groups = domain.param_groups()
    body = groups["transforms"] + groups["norms"]
    optimisers: dict[str, Optimizer] = {}
    if body:
        optimisers["body"] = Adam(body, recipe.rate, fused=True)
    if groups["weights"]:
        optimisers["weights"] = Adam(groups["weights"], recipe.weight_rate, fused=True)
    if groups["head"]:
        decay = recipe.weight_decay
        optimisers["head"] = (
            Adam(groups["head"], recipe.head_rate, weight_decay=decay, fused=True)
            if recipe.head_optimiser == "adam"
            else SGD(groups["head"], recipe.head_rate, recipe.head_momentum, weight_decay=decay)
        )
    if not optimisers:
        raise TrainingError("the domain has nothing to learn; make a new one, not a stored one")
    return optimisers


def set_rates(optimisers: dict[str, Optimizer], recipe: Recipe, epoch: float) -> None:
    """The recipe's rates at this point of training."""
    rates = {"body": recipe.rate, "weights": recipe.weight_rate, "head": recipe.head_rate}
    for name, optimiser in optimisers.items():
        for group in optimiser.param_groups:
            group["lr"] = rates[name] * recipe.factor(epoch)


def mask_density(domain: Domain) -> float | None:
    """The share of ones in all masks of a domain; None where there are no masks."""
    ones = total = 0
    for _, transform in domain.named_transforms():
        mask = transform.mask()
        if mask is not None:
            ones, total = ones + int(mask.sum()), total + mask.numel()
    return ones / total if total else None


def _placed(images: Tensor, labels: Tensor, base: Base, recipe: Recipe) -> tuple[Tensor, Tensor]:
    images, labels = images.to(base.device), labels.to(base.device)
    if recipe.channels_last and images.ndim == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, labels


def _interrupt(
    checkpoint: Path | None, run: Run, domain: Domain, optimisers: dict[str, Optimizer]
) -> None:
    if checkpoint is None:
        raise InterruptedTraining("training was asked to stop; it had no checkpoint to save to")
    run.save(checkpoint, domain, optimisers)
    raise InterruptedTraining(
        f"training was asked to stop and saved {checkpoint}; go on with --resume"
    )


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
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
