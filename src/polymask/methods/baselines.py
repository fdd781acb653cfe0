"""The baselines that masks are measured against, and what methods share that train whole weights.

The baselines that masks are measured against.

Classifier-only: W~ = W, a new head on the base's features. Bn-only: W~ = W, own norms. Finetune:
W~ free, starting at W; what one gets by training a whole network for every domain.

What methods share that train the network itself, for one domain after another.

    W~ = W + D,        D starts where the domain before ended

The norms go on in the same way. Once the last domain has learned, its D and its norms are those of
all domains, and each keeps its own head: what the earlier ones lose by that is what they forget.
The base is never written to: D is kept with the domains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn

from polymask.core.method import Method, NormPolicy, Stored, Transform
from polymask.core.network import structural_copy
from polymask.core.norms import COUNTER
from polymask.core.survey import Site
from polymask.errors import MethodError

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain


@dataclass(frozen=True, kw_only=True)
class HeadOnly(Method):
    """No site is transformed; `norms` decides between classifier-only and bn-only."""

    norms: NormPolicy = "shared"

    title: ClassVar[str] = "baselines"
    reference: ClassVar[str] = "arXiv 1701.07275"
    differences: ClassVar[str] = "None that matters: a head on frozen features, with the base's norms or with own ones."
    leaves_sites: ClassVar[bool] = True

    def transform(self, site: Site) -> None:
        """Leave every site as the base has it."""


@dataclass(frozen=True, kw_only=True)
class Finetune(Method):
    """Every weight and bias of every site is the domain's own."""

    title: ClassVar[str] = "baselines"
    reference: ClassVar[str] = "arXiv 2103.13894"
    differences: ClassVar[str] = (
        "What is stored is the difference to the base. Parameters that are no weights or biases "
        "of layers (a class token, positions, layer scales) stay the base's."
    )

    def transform(self, site: Site) -> "FreeWeights":
        """A weight, and a bias where the base has one, that start at the base's."""
        return FreeWeights(site)


class FreeWeights(Transform):
    """W~ = W + D and b~ = b + d, with D and d learned from zero."""

    components: ClassVar[Mapping[str, str]] = {"weight": "weights", "bias": "bias"}
    learns_weights: ClassVar[bool] = True

    delta: nn.Parameter
    delta_bias: nn.Parameter | None

    def __init__(self, site: Site) -> None:
        super().__init__()
        dtype = site.learned_dtype
        self.register_parameter("delta", nn.Parameter(torch.zeros(site.shape, dtype=dtype)))
        bias = torch.zeros(site.channels, dtype=dtype)
        self.register_parameter("delta_bias", nn.Parameter(bias) if site.has_bias else None)

    def weight(self, base_weight: Tensor) -> Tensor:
        """W + D."""
        return (base_weight + self.delta).to(base_weight.dtype)

    def bias(self, base_bias: Tensor | None) -> Tensor | None:
        """B + d."""
        if base_bias is None or self.delta_bias is None:
            return None
        return (base_bias + self.delta_bias).to(base_bias.dtype)

    def origins(self, base_weight: Tensor, base_bias: Tensor | None) -> list[tuple[nn.Parameter, Tensor]]:
        """W for D, and b for d: what decays is W~, not its change."""
        found = [(self.delta, base_weight)]
        if self.delta_bias is not None and base_bias is not None:
            found.append((self.delta_bias, base_bias))
        return found

    def stored(self) -> dict[str, Stored]:
        """D and d."""
        named = {"weight": self.delta, "bias": self.delta_bias}
        return {name: delta.detach() for name, delta in named.items() if delta is not None}

    def restore(self, stored: Mapping[str, Stored]) -> None:
        """Keep D and d, frozen."""
        for name, place in (("weight", "delta"), ("bias", "delta_bias")):
            if name in stored:
                tensor = stored[name]
                assert isinstance(tensor, Tensor)
                self.register_parameter(place, nn.Parameter(tensor, requires_grad=False))


PRESETS: dict[str, Method] = {
    "classifier-only": HeadOnly(),
    "bn-only": HeadOnly(norms="own"),
    "finetune": Finetune(),
}


_HEAD = "head/"  # in the names of what a domain stores


@dataclass(frozen=True, kw_only=True)
class Moving(Method):
    """Every weight, every bias and the norms of the network move with each domain."""

    moves_base: ClassVar[bool] = True
    moves_norms: ClassVar[bool] = True
    ordered: ClassVar[bool] = True

    def transform(self, site: Site) -> FreeWeights:
        """A weight, and a bias where the base has one, that start at the base's."""
        return MovedWeights(site)

    def follow(self, domain: "Domain", earlier: Sequence["Domain"]) -> None:
        """Start where the last earlier domain ended, in weights, biases and norms."""
        if not earlier:
            return
        last = earlier[-1].method
        if type(last) is not type(domain.method) or last.norms != domain.method.norms:
            raise MethodError(
                f"a domain by {domain.method.name} with norms={domain.method.norms!r} cannot "
                f"follow one by {last.name} with norms={last.norms!r}; learn all by one method"
            )
        domain.transforms.load_state_dict(earlier[-1].transforms.state_dict())
        domain.norms.load_state_dict(earlier[-1].norms.state_dict())

    def settle(self, base: "Base", domains: Sequence["Domain"]) -> "Sequence[Domain]":
        """Copies that have all of the last domain but its head; they share its tensors."""
        if not domains:
            return domains
        shared = {n: t for n, t in domains[-1].stored().items() if not n.startswith(_HEAD)}
        settled = []
        for domain in domains:
            own = {n: t for n, t in domain.stored().items() if n.startswith(_HEAD)}
            settled.append(structural_copy(domain).restore(shared | own))
        return settled

    def moved(self, base: "Base", domains: Sequence["Domain"]) -> dict[str, Tensor]:
        """The network as the last domain left it, without its classifier."""
        if not domains:
            return {}
        weights = domains[-1].weights(base)
        return {name: t.detach() for name, t in weights.items() if not name.endswith(COUNTER)}


class MovedWeights(FreeWeights):
    """W~ = W + D and b~ = b + d, in place of the base's own for all domains."""

    components: ClassVar[Mapping[str, str]] = {"weight": "moved", "bias": "moved"}


class Snapshot(nn.Module):
    """Tensors by name as they are now: not learned, and part of a run's checkpoint."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = tuple(tensors)
        for i, tensor in enumerate(tensors.values()):  # a buffer's name holds no dots
            self.register_buffer(str(i), tensor.detach().clone())

    def tensors(self) -> dict[str, Tensor]:
        """All of them."""
        return {name: self.get_buffer(str(i)) for i, name in enumerate(self.names)}


def moving_tensors(domain: "Domain") -> dict[str, Tensor]:
    """What the domain moves, by the names of the base's tensors: D, d, scales and shifts."""
    found: dict[str, Tensor] = {}
    for name, transform in domain.named_transforms():
        free = cast(FreeWeights, transform)
        found[name] = free.delta
        if free.delta_bias is not None:
            found[domain.sites[name].bias] = free.delta_bias
    for norm, own in domain.named_norms():
        found |= {f"{norm}.{name}": parameter for name, parameter in own.named_parameters()}
    return found


def own_classifier(base: "Base") -> nn.Linear | None:
    """The base's own head as a linear map of features; None where it has none.

    A convolution with a kernel of one pixel is such a map.
    """
    head = base.head
    if isinstance(head, nn.Linear) or head is None:
        return head
    weight, bias = head.weight, head.bias
    if not isinstance(weight, Tensor) or weight.numel() != len(weight) * (base.feature_dim or 0):
        return None
    classes, features = weight.shape[:2]
    linear = nn.Linear(features, classes, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().flatten(1), requires_grad=False)
    if isinstance(bias, Tensor):
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear
