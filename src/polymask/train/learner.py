"""What learns, driven by the loop of training: one domain, or several together."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.parts import Objective, Stored
from polymask.core.target import CLASSES, Target
from polymask.data.batches import Batches
from polymask.data.loader import Loader
from polymask.errors import TrainingError
from polymask.train.descent import TapByTap, decay_pulls, descend, has_depthwise, learned_by, make_optimisers, set_rates
from polymask.train.predict import evaluate
from polymask.train.recipe import Recipe


@dataclass(frozen=True)
class EpochRecord:
    """One epoch: mean loss and accuracies in percent. `val_accuracy` is None without val.

    For other targets than classes, these are what `Target.tally` and `Target.measure` give.
    """

    epoch: int
    loss: float
    train_accuracy: float
    val_accuracy: float | None


class Step(NamedTuple):
    """What one step of training saw."""

    loss: float  # on average over the images
    right: float  # images that were classified right, before the step; see `Target.tally`
    images: int


class Learner(ABC):
    """What the loop of training drives: something that learns by a recipe."""

    recipe: Recipe
    optimisers: dict[str, Optimizer]
    target: Target = CLASSES  # what is measured

    @property
    def saves(self) -> bool:
        """Whether checkpoints are its to write, and not another process's."""
        return True

    @abstractmethod
    def begin_epoch(self) -> None:
        """Go to training mode."""

    @abstractmethod
    def step(self, images: Tensor, labels: Tensor, epoch: float) -> Step:
        """One step of training, `epoch` epochs into it; nothing is changed where the loss is not finite."""

    def end_epoch(self) -> None:  # noqa: B027 - most have nothing to do
        """The steps of an epoch are done or were stopped; measuring or saving comes next."""

    @abstractmethod
    def measure(self, val: Batches) -> float:
        """What its target is measured by: accuracy in percent, for classes."""

    @abstractmethod
    def stored(self) -> dict[str, Stored]:
        """What is kept of the best epoch."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs of it."""
        return {"optimisers": {name: o.state_dict() for name, o in self.optimisers.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint has."""
        for name, optimiser in self.optimisers.items():
            optimiser.load_state_dict(state["optimisers"][name])

    @abstractmethod
    def settle(self, train: Batches, epoch: int) -> None:
        """Get ready to be measured, on the images that were learned from."""

    def density(self) -> float | None:
        """The share of ones in its masks; None where there are none."""
        return None

    def note(self, record: EpochRecord) -> None:  # noqa: B027 - most have nothing to do
        """Take note of the record of an epoch."""


class DomainLearner(Learner):
    """A domain with what it is trained by."""

    def __init__(
        self,
        base: Base,
        domain: Domain,
        recipe: Recipe,
        objective: Objective | None = None,
        optimisers: dict[str, Optimizer] | None = None,
    ) -> None:
        self.base, self.domain, self.recipe, self.objective = base, domain, recipe, objective
        self.target = domain.target
        if optimisers is None:
            optimisers = make_optimisers(learned_by([domain], [objective]), recipe)
        self.optimisers = optimisers
        self.pulls = decay_pulls(base, domain, recipe)
        self.depthwise = has_depthwise(base.net)

    def begin_epoch(self) -> None:
        self.domain.train()

    def step(self, images: Tensor, labels: Tensor, epoch: float) -> Step:
        head_only = epoch < self.domain.method.head_share * self.recipe.epochs
        set_rates(self.optimisers, self.recipe, epoch, head_only=head_only)
        images, labels = placed(images, labels, self.base, self.recipe)
        loss, logits = self.loss(images, labels)
        value = descend(loss, self.optimisers.values(), self.pulls)
        return Step(value, self.target.tally(logits.detach(), labels), len(labels))

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and its logits."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.recipe.autocast):
            with TapByTap() if self.depthwise else nullcontext():
                features = self.domain.features(self.base, images)
            logits = self.domain.classify(features)
            loss = self.target.loss(logits, labels, self.recipe.label_smoothing)
            if self.objective is not None:
                loss = loss + self.objective(images, features)
        return loss, logits

    def settle(self, train: Batches, epoch: int) -> None:
        if self.domain.method.norm_reestimate:
            device = self.base.device
            batches = as_later(train).batches(epoch)
            self.domain.reestimate_norms(self.base, (images.to(device) for images, _ in batches))

    def measure(self, val: Batches) -> float:
        return evaluate(self.base, self.domain, val)

    def stored(self) -> dict[str, Stored]:
        return self.domain.stored()

    def density(self) -> float | None:
        return mask_density(self.domain)

    def state(self) -> dict[str, Any]:
        objective = {} if self.objective is None else dict(self.objective.state_dict())
        own = {"options": self.domain.method.options(), "domain": dict(self.domain.state_dict())}
        return super().state() | own | {"objective": objective}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint has; the domain itself has been loaded before."""
        super().load(state)
        if self.objective is not None:
            self.objective.load_state_dict(state["objective"])


class Rounds:
    """Batches of several domains in turn: each round takes one of each.

    An epoch has as many rounds as the largest domain has batches, so that it is one pass over that
    domain. The others begin again when they are through, in another order, and go on from one epoch
    to the next where they were: round r of the whole training takes batch r mod n of pass r div n,
    for n batches. So no image is left out, and a domain's share of the steps is that of any other.
    """

    def __init__(self, sources: Sequence[Batches]) -> None:
        if not all(len(source) for source in sources):
            raise TrainingError("a domain has no batch to train on; give it images, or take it out")
        self.sources, self.rounds = sources, max(map(len, sources))
        self.turn = 0  # whose batch was given last

    def __len__(self) -> int:
        return self.rounds * len(self.sources)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """(images, labels) of an epoch, from batch `start` on; `turn` says whose they are."""
        done, turn = divmod(start, len(self.sources))
        begun = [epoch * self.rounds + done + (place < turn) for place in range(len(self.sources))]
        endless = [_passes(source, first) for source, first in zip(self.sources, begun, strict=True)]
        for step in range(start, len(self)):
            self.turn = step % len(self.sources)
            yield next(endless[self.turn])


class JointLearner(Learner):
    """Domains that learn together: each step is one domain's, by optimisers that all share."""

    def __init__(
        self, base: Base, domains: Sequence[Domain], rounds: Rounds, vals: Sequence[Batches | None], recipe: Recipe
    ) -> None:
        self.domains, self.rounds, self.vals, self.recipe = domains, rounds, vals, recipe
        objectives = [
            domain.method.objective(base, domain, partial(placed_batches, source, base, recipe))
            for domain, source in zip(domains, rounds.sources, strict=True)
        ]
        self.optimisers = make_optimisers(learned_by(domains, objectives), recipe)
        pairs = zip(domains, objectives, strict=True)
        self.learners = [DomainLearner(base, domain, recipe, its, self.optimisers) for domain, its in pairs]
        self.sums = [[0.0, 0, 0] for _ in domains]  # loss, right and images of each, in this epoch
        self.accuracies: list[float | None] = [None] * len(domains)
        self.histories: list[list[EpochRecord]] = [[] for _ in domains]

    def begin_epoch(self) -> None:
        for domain in self.domains:
            domain.train()

    def step(self, images: Tensor, labels: Tensor, epoch: float) -> Step:
        turn = self.rounds.turn
        found = self.learners[turn].step(images, labels, epoch - turn / len(self.rounds))  # as the round began
        for place, value in enumerate((found.loss * found.images, found.right, found.images)):
            self.sums[turn][place] += value
        return found

    def settle(self, train: Batches, epoch: int) -> None:
        for learner, source in zip(self.learners, self.rounds.sources, strict=True):
            learner.settle(source, epoch)

    def measure(self, val: Batches) -> float:
        """The mean accuracy on all that there is to measure on; `val` is one of them."""
        pairs = zip(self.learners, self.vals, strict=True)
        self.accuracies = [None if its is None else learner.measure(its) for learner, its in pairs]
        return fmean(accuracy for accuracy in self.accuracies if accuracy is not None)

    def note(self, record: EpochRecord) -> None:
        for history, (loss, right, seen), accuracy in zip(self.histories, self.sums, self.accuracies, strict=True):
            shown = self.target.scale * right / seen
            history.append(replace(record, loss=loss / seen, train_accuracy=shown, val_accuracy=accuracy))
        self.sums = [[0.0, 0, 0] for _ in self.domains]

    def stored(self) -> dict[str, Stored]:
        return {f"{place}/{n}": t for place, domain in enumerate(self.domains) for n, t in domain.stored().items()}

    def restore(self, stored: Mapping[str, Stored]) -> None:
        """Turn every domain into its stored form."""
        for place, domain in enumerate(self.domains):
            mine = {name: tensor for name, tensor in stored.items() if name.partition("/")[0] == str(place)}
            domain.restore({name.partition("/")[2]: tensor for name, tensor in mine.items()})

    def state(self) -> dict[str, Any]:
        domains = [
            {
                "state": {n: t.clone() for n, t in domain.state_dict().items()},
                "sums": sums,
                "history": [asdict(record) for record in history],
            }
            for domain, sums, history in zip(self.domains, self.sums, self.histories, strict=True)
        ]
        return super().state() | {"domains": domains}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        for domain, saved in zip(self.domains, state["domains"], strict=True):
            domain.load_state_dict(saved["state"])  # in place: what is tied stays tied
        self.sums = [list(saved["sums"][:3]) for saved in state["domains"]]
        self.histories = [[EpochRecord(**record) for record in saved["history"]] for saved in state["domains"]]


def _passes(source: Batches, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches from number `first` of all passes on, without end."""
    each, start = divmod(first, len(source))
    while True:
        yield from source.batches(each, start)
        each, start = each + 1, 0


def as_later(source: Batches) -> Batches:
    """Batches of images as they are in the end, where a recipe begins with smaller ones."""
    return source.as_later() if isinstance(source, Loader) else source


def placed_batches(source: Batches, base: Base, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one epoch, where the base is."""
    return (placed(images, labels, base, recipe) for images, labels in source.batches(0))


def placed(images: Tensor, labels: Tensor, base: Base, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """A batch where the base is and in its type, laid out as the recipe has it."""
    channels_last = recipe.channels_last and base.trains_channels_last
    return to_device(base.placed(images), labels, base.device, channels_last=channels_last)


def to_device(images: Tensor, labels: Tensor, device: torch.device, *, channels_last: bool) -> tuple[Tensor, Tensor]:
    """A batch on a device, in the layout that is asked for."""
    images, labels = images.to(device), labels.to(device)
    if channels_last and images.ndim == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, labels


def mask_density(domain: Domain) -> float | None:
    """The share of ones in all masks of a domain; None where there are no masks."""
    masks = [mask for _, transform in domain.named_transforms() if (mask := transform.mask()) is not None]
    total = sum(mask.numel() for mask in masks)
    return sum(int(mask.sum()) for mask in masks) / total if total else None
