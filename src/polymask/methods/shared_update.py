"""TALL masks and EMR: one update of the base for all domains, and a bit a weight of it for each.

    W~ = W + λ m∘τ,        b~ = b + d

τ is made of the changes τ_t = W'_t - W of all fine-tuned domains t, and is the same for all; m is the domain's mask
over it, λ a scalar. TALL masks add the changes up, and a domain keeps what is mostly its own:

    τ = Σ τ_t,        m_t = 1[|τ_t| >= c |τ - τ_t|],        λ = 1

with c chosen for each domain on val, or on its training images where there is no val. EMR elects a sign, takes the
largest change that has it, and sets the size right:

    τ = sgn(Σ τ_t) ∘ max of |τ_t| over those of that sign,        m_t = 1[τ_t τ > 0],        λ = Σ|τ_t| / Σ|m_t∘τ|

Every domain learns as fine-tuning does. Once the last has learned, they settle: τ is made, and each domain becomes its
mask. τ is kept once, in a file beside the packs. A domain that comes later makes another τ with those that come with
it; packs that are there keep theirs, and stay what they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from polymask.core.bits import Bits
from polymask.core.method import Measure, Method
from polymask.core.parts import BiasTransform, BitsTransform, Stored, Transform
from polymask.core.survey import Site
from polymask.methods.baselines import FreeWeights

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain

Rule = Literal["tall", "emr"]
STRENGTHS = (0.2, 0.3, 0.4, 0.5, 0.6)  # that c is chosen from, as the paper does


@dataclass(frozen=True, kw_only=True)
class SharedUpdate(Method):
    """Fine-tune every domain, make one update of all their changes, keep a mask over it for each.

    `strength` is c of TALL masks, of equal ones the one that is kept. `per` says what shares a λ of EMR:
    the whole network, as published, or a layer. `stage` is set by training: a new domain begins with "weights", what
    has settled has "masks".
    """

    rule: Rule = "tall"
    strength: float = 0.4
    per: Literal["network", "layer"] = "network"
    stage: Literal["weights", "masks"] = "masks"

    title: ClassVar[str] = "TALL masks, and EMR"
    reference: ClassVar[str] = "arXiv 2405.07813, 2405.17461"
    differences: ClassVar[str] = (
        "The originals merge vision transformers, whose norms have no statistics. Here every domain keeps its own "
        "norms and the changes of its biases whole, and the statistics of batch norms are gathered again under the "
        "new weights. Changes of convolutions and linear layers are shared; heads are each domain's own. λ of EMR is "
        "the paper's, over all weights; the released code adds up means of tensors, so that a small one counts as much."
    )

    settles: ClassVar[bool] = True
    needs_others: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("strength", 0.0, 100.0)

    def first_stage(self) -> "SharedUpdate":
        return replace(self, stage="weights")

    def transform(self, site: Site) -> Transform:
        """Whole weights to fine-tune, or a mask over the update that all domains share."""
        return FreeWeights(site) if self.stage == "weights" else MaskedUpdate(site)

    def settle(self, base: "Base", domains: Sequence["Domain"]) -> "Sequence[Domain]":
        """Every domain as a mask over one update, the same tensors for all."""
        changes = [changes_of(domain) for domain in domains]
        update = united(self.rule, changes)
        settled = [domain.rebuilt(base, replace(self, stage="masks")) for domain in domains]
        for domain, own, learned in zip(settled, changes, domains, strict=True):
            _give(domain, self.masks(own, update), update)
            biases = dict(learned.named_transforms())
            for name, transform in domain.named_transforms():
                cast(MaskedUpdate, transform).take_bias(cast(FreeWeights, biases[name]).delta_bias)
            domain.requires_grad_(False).eval()
        return settled

    def masks(self, changes: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """(mask, λ) of every site, by what a domain changed and the update of all."""
        found = {name: mask_of(self.rule, change, update[name], self.strength) for name, change in changes.items()}
        if self.rule == "tall":
            return {name: (mask, torch.ones(1, device=mask.device)) for name, mask in found.items()}
        sums = {name: _sums(changes[name], mask, update[name]) for name, mask in found.items()}
        whole = torch.stack(list(sums.values())).sum(0)
        shares = {name: own if self.per == "layer" else whole for name, own in sums.items()}
        sizes = {name: (own / kept if kept else torch.ones_like(own)) for name, (own, kept) in shares.items()}
        return {name: (mask, sizes[name].view(1)) for name, mask in found.items()}

    def strengths(self) -> "list[SharedUpdate]":
        """The method with each c that is tried, its own first; of EMR there is one."""
        tried = sorted({*STRENGTHS, self.strength}, key=lambda c: abs(c - self.strength))
        return [self] if self.rule == "emr" else [replace(self, strength=strength) for strength in tried]

    def finish(self, base: "Base", learned: "Domain", settled: "Domain", measure: Measure) -> "Domain":
        """The settled domain with statistics of its own images; of TALL masks, the one whose c `measure` finds best."""
        changes = changes_of(learned)
        update = {n: cast(MaskedUpdate, t).update for n, t in settled.named_transforms()}
        best, most = settled, float("-inf")
        for method in self.strengths():
            candidate = settled.rebuilt(base, replace(method, stage="masks"))
            candidate.restore(settled.frozen().stored())  # with statistics of its own
            _give(candidate, method.masks(changes, update), update)
            if (found := measure(candidate)) > most:
                best, most = candidate, found
        return best


def _give(domain: "Domain", masks: Mapping[str, tuple[Tensor, Tensor]], update: Mapping[str, Tensor]) -> None:
    for name, transform in domain.named_transforms():
        mask, size = masks[name]
        cast(MaskedUpdate, transform).take(mask, update[name], size)


def changes_of(domain: "Domain") -> dict[str, Tensor]:
    """What a domain that was fine-tuned changed, by site."""
    return {name: cast(FreeWeights, transform).delta.detach() for name, transform in domain.named_transforms()}


def united(rule: Rule, changes: "Iterable[Mapping[str, Tensor]]") -> dict[str, Tensor]:
    """τ of every site. `changes` is gone through once, by EMR twice; one of them is in memory at a time."""
    update: dict[str, Tensor] = {}
    for one in changes:
        for name, change in one.items():
            update[name] = update[name].add_(change) if name in update else change.clone()
    if rule == "tall":
        return update
    for elected in update.values():
        elected.mul_(0.0)  # a zero keeps its sign
    for one in changes:
        for name, change in one.items():
            elected = update[name]
            agrees = torch.signbit(change) == torch.signbit(elected)
            larger = torch.where(agrees, torch.maximum(elected.abs(), change.abs()), elected.abs())
            elected.copy_(torch.copysign(larger, elected))
    return update


def mask_of(rule: Rule, change: Tensor, update: Tensor, strength: float) -> Tensor:
    """m, a boolean tensor."""
    if rule == "emr":
        return change * update > 0
    return change.abs() >= strength * (update - change).abs()


def _sums(change: Tensor, mask: Tensor, update: Tensor) -> Tensor:
    """(Σ|τ_t|, Σ|m_t∘τ|) in double precision."""
    return torch.stack([change.double().abs().sum(), (update.double().abs() * mask).sum()])


class MaskedUpdate(BitsTransform, BiasTransform):
    """One site's packed mask, λ (1,) and d (channels,); τ is the tensor of all domains."""

    components: ClassVar[Mapping[str, str]] = {"mask": "mask", "size": "scalars", "bias": "bias", "update": "shared"}
    beside: ClassVar[tuple[str, ...]] = ("update",)

    size: Tensor
    update: Tensor

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.shape = site.shape
        self.register_buffer("words", Bits.of(torch.zeros(site.shape, dtype=torch.bool)).words)
        self.register_buffer("size", torch.ones(1, dtype=site.learned_dtype))
        self.register_buffer("update", torch.zeros(site.shape, dtype=site.learned_dtype))
        self.begin_bias(site)

    def take(self, mask: Tensor, update: Tensor, size: Tensor) -> None:
        """Have this mask over this update, which is kept and not copied."""
        self.words, self.update = Bits.of(mask).words, update
        self.size = size.to(self.size)

    @torch.no_grad()
    def take_bias(self, change: Tensor | None) -> None:
        if self.delta_bias is not None and change is not None:
            self.delta_bias.copy_(change)

    def weight(self, base_weight: Tensor) -> Tensor:
        return (base_weight + self.size * (self.mask() * self.update)).to(base_weight.dtype)

    def scalars(self) -> Mapping[str, Tensor]:
        return {"size": self.size}

    def stored(self) -> dict[str, Stored]:
        bias = {} if self.delta_bias is None else {"bias": self.delta_bias.detach()}
        return super().stored() | {"size": self.size, "update": self.update} | bias

    def restore(self, stored: Mapping[str, Stored]) -> None:
        super().restore(stored)
        self.size, self.update = cast(Tensor, stored["size"]), cast(Tensor, stored["update"])
        if "bias" in stored:
            self.delta_bias = nn.Parameter(cast(Tensor, stored["bias"]), requires_grad=False)


PRESETS: dict[str, Method] = {"tall-mask": SharedUpdate(), "emr": SharedUpdate(rule="emr")}
