"""What learns: something with parameters and its optimisers; here, a domain and its objective."""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.method import Objective, Stored
from polymask.errors import TrainingError
from polymask.train.depthwise import TapByTap, has_depthwise
from polymask.train.predict import Batches, evaluate
from polymask.train.recipe import Optimiser, Recipe

FUSING = ("cpu", "cuda", "mps", "xpu")  # devices with fused optimisers
FUSED_TYPES = (torch.float32, torch.float64)  # in half precision, torch's SGD on CPUs does nothing


class Step(NamedTuple):
    """What one step of training saw."""

    loss: float  # on average over the images
    right: int  # images that were classified right, before the step
    images: int


class Learner(ABC):
    """What the loop of training drives: something that learns by a recipe."""

    recipe: Recipe
    optimisers: dict[str, Optimizer]

    @property
    def saves(self) -> bool:
        """Whether checkpoints are its to write, and not another process's."""
        return True

    @abstractmethod
    def placed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A batch where it is wanted, laid out as the recipe has it."""

    @abstractmethod
    def begin_epoch(self) -> None:
        """Go to training mode."""

    @abstractmethod
    def step(self, images: Tensor, labels: Tensor, epoch: float) -> Step:
        """One step of training, `epoch` epochs into it.

        Nothing is changed where the loss is not finite.
        """

    def end_epoch(self) -> None:  # noqa: B027 - most have nothing to do
        """The steps of an epoch are done, or were stopped: measuring or saving comes next."""

    @abstractmethod
    def measure(self, val: Batches) -> float:
        """Accuracy in percent."""

    @abstractmethod
    def stored(self) -> dict[str, Stored]:
        """What is kept of the best epoch."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint needs of it."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint has."""

    @abstractmethod
    def settle(self, train: Batches, epoch: int) -> None:
        """Get ready to be measured, on the images that were learned from."""

    def density(self) -> float | None:
        """The share of ones in its masks; None where there are none."""
        return None


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
        if optimisers is None:
            optimisers = make_optimisers(learned_by([domain], [objective]), recipe)
        self.optimisers = optimisers
        self.pulls = decay_pulls(base, domain, recipe)
        self.depthwise = has_depthwise(base.net)

    def placed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return placed(images, labels, self.base, self.recipe)

    def begin_epoch(self) -> None:
        self.domain.train()

    def step(self, images: Tensor, labels: Tensor, epoch: float) -> Step:
        head_only = epoch < self.domain.method.head_share * self.recipe.epochs
        set_rates(self.optimisers, self.recipe, epoch, head_only=head_only)
        loss, logits = self.loss(images, labels)
        value = descend(loss, self.optimisers.values(), self.pulls)
        return Step(value, count_hits(logits, labels), len(labels))

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and its logits."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.recipe.autocast):
            with TapByTap() if self.depthwise else nullcontext():
                features = self.domain.features(self.base, images)
            logits = self.domain.classify(features)
            loss = F.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
            if self.objective is not None:
                loss = loss + self.objective(images, features)
        return loss, logits

    def settle(self, train: Batches, epoch: int) -> None:
        if self.domain.method.norm_reestimate:
            batches = train.batches(epoch)
            device = self.base.device
            self.domain.reestimate_norms(self.base, (images.to(device) for images, _ in batches))

    def measure(self, val: Batches) -> float:
        return evaluate(self.base, self.domain, val)

    def stored(self) -> dict[str, Stored]:
        return self.domain.stored()

    def density(self) -> float | None:
        return mask_density(self.domain)

    def state(self) -> dict[str, Any]:
        return {
            "options": self.domain.method.options(),
            "domain": dict(self.domain.state_dict()),
            "optimisers": {name: o.state_dict() for name, o in self.optimisers.items()},
            "objective": {} if self.objective is None else dict(self.objective.state_dict()),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint has; the domain itself has been loaded before."""
        for name, optimiser in self.optimisers.items():
            optimiser.load_state_dict(state["optimisers"][name])
        if self.objective is not None:
            self.objective.load_state_dict(state["objective"])


def count_hits(logits: Tensor, labels: Tensor) -> int:
    """How many images got their own class."""
    return int((logits.argmax(1) == labels).sum())


Pull = tuple[nn.Parameter, Tensor, float]


def decay_pulls(base: Base, domain: Domain, recipe: Recipe) -> list[Pull]:
    """What decay adds to the gradients of changes of whole weights.

    Optimisers add decay times the change D; for W~ = W + D to decay, decay times W is missing.
    """
    if not recipe.weight_decay:
        return []
    found: list[Pull] = []
    for name, transform in domain.named_transforms():
        site = domain.sites[name]
        bias = base.tensor(site.bias) if site.has_bias else None
        for parameter, origin in transform.origins(base.tensor(name), bias):
            if parameter.requires_grad:
                found.append((parameter, origin, recipe.weight_decay))
    return found


def descend(loss: Tensor, optimisers: Iterable[Optimizer], pulls: Iterable[Pull] = ()) -> float:
    """One step down the gradient of `loss`, unless it is not finite; the loss as a number."""
    value = loss.item()
    if not math.isfinite(value):
        return value
    chosen = list(optimisers)
    for optimiser in chosen:
        optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter, origin, decay in pulls:
        if parameter.grad is not None:
            parameter.grad.add_(origin, alpha=decay)
    for optimiser in chosen:
        optimiser.step()
        optimiser.zero_grad()  # the next step's weights can use their memory
    return value


def placed(images: Tensor, labels: Tensor, base: Base, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """A batch where the base is and in its type, laid out as the recipe has it."""
    channels_last = recipe.channels_last and base.trains_channels_last
    return moved(base.placed(images), labels, base.device, channels_last=channels_last)


def moved(images: Tensor, labels: Tensor, device: torch.device, *, channels_last: bool) -> tuple[Tensor, Tensor]:
    """A batch on a device, in the layout that is asked for."""
    images, labels = images.to(device), labels.to(device)
    if channels_last and images.ndim == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, labels


def mask_density(domain: Domain) -> float | None:
    """The share of ones in all masks of a domain; None where there are no masks."""
    ones = total = 0
    for _, transform in domain.named_transforms():
        mask = transform.mask()
        if mask is not None:
            ones, total = ones + int(mask.sum()), total + mask.numel()
    return ones / total if total else None


def learned_by(domains: Sequence[Domain], objectives: Sequence[Objective | None]) -> dict[str, list[nn.Parameter]]:
    """What several domains and their objectives learn, by part; what they share is there once.

    Scores and scalars are parts of their own here, apart from the other transforms.
    """
    groups: dict[str, dict[int, nn.Parameter]] = defaultdict(dict)
    for domain, objective in zip(domains, objectives, strict=True):
        for name, parameters in domain.param_groups().items():
            groups[name] |= {id(p): p for p in parameters}
        if objective is not None:
            groups["head"] |= {id(p): p for p in objective.parameters()}
        for _, part in domain.named_parts():
            for name, some in (
                ("scores", part.score_parameters()),
                ("scalars", part.scalar_parameters()),
            ):
                taken = {id(p): groups["transforms"].pop(id(p)) for p in some if p.requires_grad}
                groups[name] |= taken
    return {name: list(parameters.values()) for name, parameters in groups.items()}


def make_optimisers(groups: dict[str, list[nn.Parameter]], recipe: Recipe) -> dict[str, Optimizer]:
    """One for transforms and norms, one for whole weights, and the head's own.

    Scalars are the first one's, unless the recipe has a rate for them.
    """
    decaying, scalars = list(groups["transforms"]), list(groups.get("scalars", []))
    if recipe.scalar_rate is None:
        decaying, scalars = decaying + scalars, []
    body, rates = (recipe.optimiser, recipe.momentum), rates_of(recipe)
    chosen = {
        "body": (decaying, recipe.transform_decay, body),
        "scalars": (scalars, recipe.transform_decay, body),
        "weights": (groups["weights"], recipe.weight_decay, body),
        "head": (groups["head"], recipe.head_decay, (recipe.head_optimiser, recipe.head_momentum)),
    }
    fixed = {"body": list(groups.get("scores", [])) + list(groups["norms"])}  # these never decay
    optimisers: dict[str, Optimizer] = {}
    for name, (parameters, decay, (kind, momentum)) in chosen.items():
        parts = [(parameters, decay), (fixed.get(name, []), 0.0)]
        made = [{"params": some, "weight_decay": its} for some, its in parts if some]
        if made:
            optimisers[name] = make_optimiser(made, kind, rates[name], momentum)
    if not optimisers:
        raise TrainingError("the domain has nothing to learn; make a new one, not a stored one")
    return optimisers


def make_optimiser(groups: list[dict[str, Any]], kind: Optimiser, rate: float, momentum: float) -> Optimizer:
    """Adam, or SGD with a momentum; each in one pass over memory where the device can do that.

    A group has its `params` and its `weight_decay`.
    """
    parameters = [p for group in groups for p in group["params"]]
    fused = all(p.dtype in FUSED_TYPES and p.device.type in FUSING for p in parameters)
    if kind == "adam":
        return Adam(groups, rate, fused=fused)
    return SGD(groups, rate, momentum, fused=fused)


def rates_of(recipe: Recipe) -> dict[str, float]:
    """The recipe's rate for each optimiser."""
    scalars = recipe.rate if recipe.scalar_rate is None else recipe.scalar_rate
    return {
        "body": recipe.rate,
        "scalars": scalars,
        "weights": recipe.weight_rate,
        "head": recipe.head_rate,
    }


def set_rates(optimisers: dict[str, Optimizer], recipe: Recipe, epoch: float, *, head_only: bool = False) -> None:
    """The recipe's rates at this point of training; none but the head's where that goes first."""
    rates = rates_of(recipe)
    for name, optimiser in optimisers.items():
        rests = head_only and name != "head"
        for group in optimiser.param_groups:
            group["lr"] = 0.0 if rests else rates[name] * recipe.factor(epoch)
