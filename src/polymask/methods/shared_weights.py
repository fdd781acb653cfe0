"""What methods share that train the network itself, for one domain after another.

    W~ = W + D,        D starts where the domain before ended

The norms go on in the same way. Once the last domain has learned, its D and its norms are those of all domains, and
each keeps its own head: what the earlier ones lose by that is what they forget. The base is never written to: D is kept
with the domains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from torch import Tensor, nn

from polymask.core.method import Method
from polymask.core.network import structural_copy
from polymask.core.parts import COUNTER
from polymask.core.survey import Site
from polymask.errors import MethodError
from polymask.methods.baselines import FreeWeights

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain


@dataclass(frozen=True, kw_only=True)
class SharedWeightsMethod(Method):
    """Every weight, every bias and the norms of the network are trained on by each domain."""

    moves_base: ClassVar[bool] = True
    moves_norms: ClassVar[bool] = True
    ordered: ClassVar[bool] = True
    for_classes: ClassVar[bool] = True

    def transform(self, site: Site) -> FreeWeights:
        return SharedWeights(site)

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
        shared = domains[-1].stored()
        heads = [{n: t for n, t in domain.stored().items() if n.startswith("head/")} for domain in domains]
        return [structural_copy(domain).restore(shared | head) for domain, head in zip(domains, heads, strict=True)]

    def moved(self, base: "Base", domains: Sequence["Domain"]) -> dict[str, Tensor]:
        """The network as the last domain left it, without its classifier."""
        if not domains:
            return {}
        weights = domains[-1].weights(base)
        return {name: t.detach() for name, t in weights.items() if not name.endswith(COUNTER)}


class SharedWeights(FreeWeights):
    """W~ = W + D and b~ = b + d, which all domains have in place of the base's own."""

    components: ClassVar[Mapping[str, str]] = {"weight": "moved", "bias": "moved"}


class Snapshot(nn.Module):
    """Tensors by name as they are now: not learned, and part of a run's checkpoint."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = tuple(tensors)
        for i, tensor in enumerate(tensors.values()):  # a buffer's name holds no dots
            self.register_buffer(str(i), tensor.detach().clone())

    def tensors(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(str(i)) for i, name in enumerate(self.names)}


def trained_tensors(domain: "Domain") -> dict[str, Tensor]:
    """What the domain trains of the network, by the names of the base's tensors: D, d, scales and shifts."""
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
