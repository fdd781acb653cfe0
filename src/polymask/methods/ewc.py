"""Elastic weight consolidation: what mattered to earlier domains is held where it was.

    L = CE(new) + strength / 2 * sum_i f_i (theta_i - theta*_i)^2,        f = F / mean_i F_i

theta are all weights and biases of the sites and the norms' scales and shifts, theta* those before
this domain. F is the diagonal of the Fisher information, the mean over images x of

    (d log p(y | x) / d theta_i)^2,        y drawn from p(y | x),

of each image by itself, in eval mode. The size of F depends on how sure a network is of its answers, by orders of
magnitude: after a domain has learned its images well, it is tiny compared with the base's. So each F is divided by its
mean over all i, and `strength` has no scale. When a domain has learned, its own f, from its images and its head, is
added to those of earlier domains: one sum around the latest theta*, in which all domains count alike. The base's own
images are not available, so its F is that of its own classifier on the first domain's images. A base without a
classifier has nothing to preserve: its first domain is fine-tuned.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polymask.core.method import Images, Method
from polymask.core.parts import NormPolicy, Objective, Part
from polymask.core.survey import Site, learned_type
from polymask.errors import MethodError
from polymask.methods.baselines import FreeWeights
from polymask.methods.shared_weights import (
    SharedWeights,
    SharedWeightsMethod,
    Snapshot,
    own_classifier,
    trained_tensors,
)

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain


@dataclass(frozen=True, kw_only=True)
class Ewc(SharedWeightsMethod):
    """CE(new) + strength / 2 * sum_i f_i (theta_i - theta*_i)^2, f = F / mean F.

    F is estimated on `fisher_batches` batches. `keep_fisher=False` leaves it out of what is stored, for a domain that
    none will follow.
    """

    norms: NormPolicy = "affine"
    strength: float = 20.0
    fisher_batches: int = 16
    keep_fisher: bool = True

    title: ClassVar[str] = "elastic weight consolidation"
    reference: ClassVar[str] = "arXiv 1612.00796"
    differences: ClassVar[str] = (
        "The Fisher information of the base is taken on the first domain's images with labels drawn from its own "
        "classifier, since its images are not there. Later domains add theirs to one sum around the latest weights, "
        "where the paper has a penalty for each. Each is divided by its mean first, which the paper does not do, so "
        "that a strength suits networks whose losses differ in scale. The strength is our choice and not tuned. With "
        "own norms the statistics move without a "
        "penalty, so `norms` is `affine`."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("strength", 0, 1e12)
        self.check_whole("fisher_batches")

    def transform(self, site: Site) -> FreeWeights:
        return HeldWeights(site) if self.keep_fisher else SharedWeights(site)

    def carry(self, base: "Base") -> "HeldNorms | None":
        return HeldNorms(base) if self.keep_fisher and self.norms in ("own", "affine") else None

    def objective(self, base: "Base", domain: "Domain", images: Images) -> Objective | None:
        """The penalty; for a first domain the base's own F is estimated before."""
        if not self.strength:
            return None
        held, head = held_fisher(domain), own_classifier(base)
        if head is not None and not any(f.any() for f in held.values()):
            held = of_mean_one(fisher(base, domain, head, self._some(images)))
            hold_fisher(domain, held)
        return Penalty(domain, held, self.strength)

    def next_stage(self, base: "Base", domain: "Domain", images: Images) -> None:
        """Add the f of what the domain has learned to that of those before."""
        if self.strength and self.keep_fisher and domain.head is not None:
            own = of_mean_one(fisher(base, domain, domain.head, self._some(images)))
            hold_fisher(domain, {n: f + own[n] for n, f in held_fisher(domain).items()})

    def follow(self, domain: "Domain", earlier: Sequence["Domain"]) -> None:
        """Start where the last one ended, with the f of all before."""
        if not earlier:
            return
        methods = [each.method for each in (earlier[-1], domain)]
        if any(isinstance(method, Ewc) and not method.keep_fisher for method in methods):
            raise MethodError(
                "a domain with keep_fisher=False keeps nothing for the next one; make all of them with keep_fisher=True"
            )
        super().follow(domain, earlier)
        held = held_fisher(earlier[-1])
        if _mean(held) < 0.5:  # a pack from when F was not divided by its mean: f sums to 1 or more
            held = {name: len(earlier) * f for name, f in of_mean_one(held).items()}
        hold_fisher(domain, held)

    def _some(self, images: Images) -> Iterable[Tensor]:
        return (batch for batch, _ in islice(images(), self.fisher_batches))


class HeldWeights(SharedWeights):
    """W~ = W + D and b~ = b + d, and the F of both."""

    components: ClassVar[Mapping[str, str]] = {**SharedWeights.components, "fisher": "shared", "fisher_bias": "shared"}

    fisher: Tensor
    fisher_bias: Tensor | None

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.register_buffer("fisher", torch.zeros_like(self.delta.detach()))
        bias = None if self.delta_bias is None else torch.zeros_like(self.delta_bias.detach())
        self.register_buffer("fisher_bias", bias)


class HeldNorms(Part):
    """The F of the norms' scales and shifts."""

    def __init__(self, base: "Base") -> None:
        super().__init__()
        for name in (f"{norm.name}.{leaf}" for norm in base.norms.values() for leaf in norm.affine):
            zeros = torch.zeros(base.tensor(name).shape, dtype=learned_type(base.tensor(name).dtype))
            self.register_buffer(name.replace(".", ":"), zeros)  # the name of a buffer holds no dots

    def component(self, name: str) -> str:
        return "shared"

    def by_name(self) -> dict[str, Tensor]:
        """F by the names of the base's tensors."""
        return {key.replace(":", "."): buffer for key, buffer in self.named_buffers()}


class Penalty(Objective):
    """strength / 2 * sum_i f_i (theta_i - theta*_i)^2, with theta* from where it began."""

    def __init__(self, domain: "Domain", fisher: Mapping[str, Tensor], strength: float) -> None:
        super().__init__()
        trained = trained_tensors(domain)
        self.strength = strength
        self.trained = tuple(trained[name] for name in fisher)  # the domain's, not its own
        self.start = Snapshot({name: trained[name] for name in fisher})
        self.fisher = Snapshot(fisher)

    def forward(self, images: Tensor, features: Tensor) -> Tensor:
        fisher, start = self.fisher.tensors().values(), self.start.tensors().values()
        total = features.new_zeros(())
        for now, then, weight in zip(self.trained, start, fisher, strict=True):
            total = total + (weight * (now - then).square()).sum()
        return 0.5 * self.strength * total


def fisher(
    base: "Base", domain: "Domain", head: Callable[[Tensor], Tensor], batches: Iterable[Tensor]
) -> dict[str, Tensor]:
    """The mean of (d log p(y | x) / d theta)^2 over images x, y drawn from p; by tensor's name.

    One backward pass an image: the square of a sum of gradients is not the sum of squares.
    """
    weights = {name: tensor.detach() for name, tensor in domain.weights(base).items()}
    wanted = {name: weights[name].requires_grad_() for name in trained_tensors(domain)}
    sums = {name: torch.zeros_like(t, dtype=learned_type(t.dtype)) for name, t in wanted.items()}
    count = 0
    for batch in batches:
        for image in batch.unsqueeze(1).unbind():
            logits = head(base.run(weights, image))
            log_p = F.log_softmax(logits.to(learned_type(logits.dtype)), 1)[0]
            label = torch.multinomial(log_p.detach().exp(), 1)
            gradients = torch.autograd.grad(log_p[label], list(wanted.values()), allow_unused=True)
            for total, gradient in zip(sums.values(), gradients, strict=True):
                if gradient is not None:
                    total.addcmul_(gradient.to(total.dtype), gradient.to(total.dtype))
            count += 1
    return {name: total / max(count, 1) for name, total in sums.items()}


def of_mean_one(fisher: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """F = F / mean_i F_i, over the entries of all tensors; 0 where all of F is."""
    mean = _mean(fisher)
    return {name: f / mean if mean else f for name, f in fisher.items()}


def _mean(fisher: Mapping[str, Tensor]) -> float:
    count = sum(f.numel() for f in fisher.values())
    return sum(float(f.sum(dtype=torch.float64)) for f in fisher.values()) / max(count, 1)


def held_fisher(domain: "Domain") -> dict[str, Tensor]:
    """The F that a domain keeps, by the names of the base's tensors."""
    found: dict[str, Tensor] = {}
    for name, transform in domain.named_transforms():
        if isinstance(transform, HeldWeights):
            found[name] = transform.fisher
            if transform.fisher_bias is not None:
                found[domain.sites[name].bias] = transform.fisher_bias
    if isinstance(domain.route, HeldNorms):
        found |= domain.route.by_name()
    return found


def hold_fisher(domain: "Domain", fisher: Mapping[str, Tensor]) -> None:
    """Copy F to where the domain keeps it, if it does."""
    for name, held in held_fisher(domain).items():
        held.copy_(fisher[name])


PRESETS: dict[str, Method] = {"ewc": Ewc()}
