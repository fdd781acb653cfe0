"""What learns: a domain, its optimisers and its objective; one step of all of them."""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from polymask.base import Base
from polymask.domain import Domain
from polymask.errors import TrainingError
from polymask.methods import Objective
from polymask.recipes import Recipe


class Learner:
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

    def step(self, images: Tensor, labels: Tensor, epoch: float) -> tuple[float, Tensor]:
        """One step of training, `epoch` epochs into it; the loss, and the logits before it.

        Nothing is changed where the loss is not finite.
        """
        head_only = epoch < self.domain.method.head_share * self.recipe.epochs
        set_rates(self.optimisers, self.recipe, epoch, head_only=head_only)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.recipe.autocast):
            features = self.domain.features(self.base, images)
            logits = self.domain.classify(features)
            loss = F.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
            if self.objective is not None:
                loss = loss + self.objective(images, features)
        value = loss.item()
        if not math.isfinite(value):
            return value, logits
        for optimiser in self.optimisers.values():
            optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimiser in self.optimisers.values():
            optimiser.step()
        return value, logits


def learned_by(
    domains: Sequence[Domain], objectives: Sequence[Objective | None]
) -> dict[str, list[nn.Parameter]]:
    """What several domains and their objectives learn, by part; what they share is there once."""
    groups: dict[str, dict[int, nn.Parameter]] = defaultdict(dict)
    for domain, objective in zip(domains, objectives, strict=True):
        for name, parameters in domain.param_groups().items():
            groups[name] |= {id(p): p for p in parameters}
        if objective is not None:
            groups["head"] |= {id(p): p for p in objective.parameters()}
    return {name: list(parameters.values()) for name, parameters in groups.items()}


def make_optimisers(groups: dict[str, list[nn.Parameter]], recipe: Recipe) -> dict[str, Optimizer]:
    """One for transforms and norms, one for whole weights, and the head's own."""
    chosen = {
        "body": (groups["transforms"] + groups["norms"], recipe.optimiser, recipe.rate),
        "weights": (groups["weights"], recipe.optimiser, recipe.weight_rate),
        "head": (groups["head"], recipe.head_optimiser, recipe.head_rate),
    }
    optimisers: dict[str, Optimizer] = {}
    for name, (parameters, kind, rate) in chosen.items():
        if not parameters:
            continue
        decay = recipe.weight_decay if name == "head" else 0.0
        momentum = recipe.head_momentum if name == "head" else recipe.momentum
        optimisers[name] = (
            Adam(parameters, rate, weight_decay=decay, fused=True)
            if kind == "adam"
            else SGD(parameters, rate, momentum, weight_decay=decay)
        )
    if not optimisers:
        raise TrainingError("the domain has nothing to learn; make a new one, not a stored one")
    return optimisers


def set_rates(
    optimisers: dict[str, Optimizer], recipe: Recipe, epoch: float, *, head_only: bool = False
) -> None:
    """The recipe's rates at this point of training; none but the head's where that goes first."""
    body = 0.0 if head_only else 1.0
    rates = {
        "body": body * recipe.rate,
        "weights": body * recipe.weight_rate,
        "head": recipe.head_rate,
    }
    for name, optimiser in optimisers.items():
        for group in optimiser.param_groups:
            group["lr"] = rates[name] * recipe.factor(epoch)
