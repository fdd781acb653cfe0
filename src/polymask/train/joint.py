"""Training several domains together: round-robin, one batch of each, one step for each batch.

An epoch has as many rounds as the largest domain has batches, so that it is one pass over that
domain. The others begin again when they are through, in another order, and go on from one epoch to
the next where they were: round r of the whole training takes batch r mod n of pass r div n, for n
batches. So no image is left out, and a domain's share of the steps is that of any other.
"""

import math
import statistics
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.errors import InterruptedTraining, NotFinite, TrainingError
from polymask.train.fit import Listener, seeded, stop_signals
from polymask.train.learner import DomainLearner, learned_by, make_optimisers, placed
from polymask.train.predict import Batches, evaluate
from polymask.train.recipe import Recipe
from polymask.train.state import (
    CheckpointError,
    EpochRecord,
    Run,
    copied,
    domain_identity,
    load_checkpoint,
    pack_stored,
    plain,
    save_checkpoint,
    unpack_stored,
)


class JointRun:
    """Where a joint training stands: one `Run` a domain, and the best of all on average."""

    def __init__(
        self,
        base: Base,
        domains: Sequence[Domain],
        trains: Sequence[Batches],
        recipe: Recipe,
        seed: int,
    ) -> None:
        if not all(len(train) for train in trains):
            raise TrainingError("a domain has no batch to train on; give it images, or take it out")
        self.domains, self.steps = domains, max(len(train) for train in trains)
        objectives = [
            domain.method.objective(base, domain, partial(_images, base, train, recipe))
            for domain, train in zip(domains, trains, strict=True)
        ]
        self.optimisers = make_optimisers(learned_by(domains, objectives), recipe)
        self.learners = [
            DomainLearner(base, domain, recipe, objective, self.optimisers)
            for domain, objective in zip(domains, objectives, strict=True)
        ]
        self.runs = [Run(domain_identity(domain, recipe, seed)) for domain in domains]
        self.epoch = self.step = 0
        self.best_accuracy = -1.0

    @property
    def identity(self) -> object:
        """What must be the same for a checkpoint to be of this run."""
        return plain([self.steps, *(run.identity for run in self.runs)])

    def finish_epoch(self, accuracies: Sequence[float | None], recipe: Recipe) -> None:
        """Close the epoch, and keep all domains if they are the best so far on average."""
        known = [accuracy for accuracy in accuracies if accuracy is not None]
        better = bool(known) and statistics.mean(known) > self.best_accuracy
        for run, domain, accuracy in zip(self.runs, self.domains, accuracies, strict=True):
            run.close_epoch(accuracy)
            if better and recipe.selection == "best":
                run.best = copied(domain.stored())
        if better:
            self.best_accuracy = statistics.mean(known)
        self.epoch, self.step = self.epoch + 1, 0

    def save(self, path: Path) -> None:
        """Write all that is needed to go on from here."""
        state = {
            "identity": self.identity,
            "place": [self.epoch, self.step, self.best_accuracy],
            "random": torch.get_rng_state(),
            "optimisers": {name: o.state_dict() for name, o in self.optimisers.items()},
            "domains": [
                {
                    "state": {n: t.clone() for n, t in domain.state_dict().items()},
                    "best": pack_stored(run.best or {}),
                    "sums": [run.loss, run.right, run.seen, run.epoch],
                    "history": [asdict(record) for record in run.history],
                }
                for domain, run in zip(self.domains, self.runs, strict=True)
            ],
        }
        save_checkpoint(path, state)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of the same run; raise if it is of another one."""
        state = load_checkpoint(path)
        if state["identity"] != self.identity:
            raise CheckpointError(
                f"{path} is of a run with other domains, options or seed; resume with the same "
                "ones, or delete it to start again"
            )
        self.epoch, self.step, self.best_accuracy = state["place"]
        for name, optimiser in self.optimisers.items():
            optimiser.load_state_dict(state["optimisers"][name])
        for domain, run, saved in zip(self.domains, self.runs, state["domains"], strict=True):
            domain.load_state_dict(saved["state"])  # in place: what is tied stays tied
            run.best = unpack_stored(saved["best"]) or None
            run.loss, run.right, run.seen, run.epoch = saved["sums"]
            run.history = [EpochRecord(**record) for record in saved["history"]]
        torch.set_rng_state(state["random"])


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

    An epoch is as long as the longest of `trains`; the others begin again. The best epoch is that
    of the best mean accuracy on val.
    """
    if recipe.selection == "best" and any(val is None for val in vals):
        raise TrainingError("selection='best' needs val; give it, or set selection='last'")
    listener = listener or Listener()
    torch.manual_seed(seed)
    with seeded(seed):
        run = JointRun(base, domains, trains, recipe, seed)
    if resume and checkpoint is not None and checkpoint.exists():
        run.load(checkpoint)
    with stop_signals() as stop:
        listener.begin(recipe, run.steps * len(domains), run.epoch)
        try:
            while run.epoch < recipe.epochs:
                _train_epoch(run, trains, recipe, listener, stop)
                if stop.is_set():
                    _interrupt(run, checkpoint)
                pairs = zip(domains, vals, strict=True)
                found = [None if v is None else evaluate(base, d, v) for d, v in pairs]
                run.finish_epoch(found, recipe)
                if checkpoint is not None:
                    run.save(checkpoint)
        finally:
            listener.end()
    for domain, its in zip(domains, run.runs, strict=True):
        domain.restore(its.best or copied(domain.stored()))
    return [its.history for its in run.runs]


def _images(base: Base, train: Batches, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    for images, labels in train.batches(0):
        yield placed(images, labels, base, recipe)


def _train_epoch(
    run: JointRun,
    trains: Sequence[Batches],
    recipe: Recipe,
    listener: Listener,
    stop: threading.Event,
) -> None:
    """The rest of the current epoch, or what comes before a signal to stop."""
    for learner in run.learners:
        learner.domain.train()
    sources = [_passes(train, run.epoch * run.steps + run.step) for train in trains]
    while run.step < run.steps and not stop.is_set():
        when = run.epoch + run.step / run.steps
        for place, (learner, its, source) in enumerate(zip(run.learners, run.runs, sources, strict=True)):
            images, labels = placed(*next(source), learner.base, recipe)
            found = learner.step(images, labels, when)
            if not math.isfinite(found.loss):
                raise NotFinite(
                    f"the loss is {found.loss} in epoch {run.epoch}, step {run.step}; try smaller "
                    f"rates than {recipe.rate}, {recipe.weight_rate} and {recipe.head_rate}"
                )
            its.add(found)
            done = run.step * len(run.learners) + place + 1
            listener.step(run.epoch, done, found.loss, found.images, None)
        run.step += 1


def _passes(train: Batches, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches from number `first` of all passes on, without end."""
    each, start = divmod(first, len(train))
    while True:
        yield from train.batches(each, start)
        each, start = each + 1, 0


def _interrupt(run: JointRun, checkpoint: Path | None) -> None:
    if checkpoint is None:
        raise InterruptedTraining("training was asked to stop; it had no checkpoint to save to")
    run.save(checkpoint)
    raise InterruptedTraining(f"training was asked to stop and saved {checkpoint}; go on with resume=True")
