"""Series adapters in a network whose own weights learn with them.

    V = W + D,        z = y + A BN(y),        y = V * x + b

D is the same for all domains, A, BN and the norms are each domain's own. `series-adapter-joint`
learns D from all domains together. `series-adapter-n` has it from the base's own images: what
series adapters are made for is a network that was pretrained with adapters in it. A domain of
`series-adapter-joint` that learns the base's own images is that network; domains that follow it
take its D, and fix it. Biases are not moved. Sites that get no adapter are moved all the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from polymask.core.method import Method, Transform
from polymask.core.survey import Site
from polymask.errors import MethodError
from polymask.methods.series_adapter import Adapter, SeriesAdapter

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain


@dataclass(frozen=True, kw_only=True)
class SeriesAdapterJoint(SeriesAdapter):
    """Adapters of each domain's own after layers that all domains train."""

    title: ClassVar[str] = "series adapters and their network"
    differences: ClassVar[str] = (
        "That the original trains the shared 3x3 kernels from all domains is remembered, not read. "
        "An epoch is one pass over the largest domain, within which the others begin again; in its "
        "released loop it ends with the smallest domain, and sees a part of the others. Every "
        "kernel is moved here, 1x1 ones and linear layers too; biases, which its network has not, "
        "are not."
    )
    joint: ClassVar[bool] = True
    moves_base: ClassVar[bool] = True

    def transform(self, site: Site) -> Transform:
        """D, which learns, and an adapter where one is to be."""
        return _moved_layer(self, site, learns=True)

    def tie(self, domains: Sequence["Domain"]) -> None:
        """Make D of every site one parameter."""
        first = _moved_layers(domains[0])
        for domain in domains[1:]:
            for name, layer in _moved_layers(domain).items():
                layer.delta = first[name].delta

    def moved(self, base: "Base", domains: Sequence["Domain"]) -> dict[str, Tensor]:
        """V by site."""
        return _moved(base, domains[0])


@dataclass(frozen=True, kw_only=True)
class SeriesAdapterN(SeriesAdapter):
    """Series adapters in a network that was pretrained with adapters in it.

    `fit_all(..., own=)` pretrains it on the base's own images, and refuses to go on without: on
    the base as it is this would be `series-adapter` under another name. By hand: teach a domain of
    `series-adapter-joint` the base's own images, then call `domain.method.follow(domain, [it])` on
    each new domain before that learns; one that has nothing to follow has D = 0.
    `inherit` says what a domain starts with beside D: "norms" takes over BN and the norms, and
    draws A anew, as the original does; "adapters" takes over A too.
    """

    inherit: Literal["norms", "adapters"] = "norms"

    differences: ClassVar[str] = (
        "The original pretrains from scratch with adapters in place; here pretraining starts from "
        "the base's weights. It takes the base's own images, and is refused where there are none."
    )
    needs_own: ClassVar[bool] = True
    moves_base: ClassVar[bool] = True
    base_stage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("inherit", ("norms", "adapters"))

    def transform(self, site: Site) -> Transform:
        """D, which is fixed, and an adapter where one is to be."""
        return _moved_layer(self, site, learns=False)

    def for_base(self) -> Method:
        """The base's weights learn, with adapters in it."""
        options = {f.name: getattr(self, f.name) for f in fields(SeriesAdapterJoint)}
        return SeriesAdapterJoint(**(options | {"name": "series-adapter-joint"}))

    @torch.no_grad()
    def follow(self, domain: "Domain", earlier: Sequence["Domain"]) -> None:
        """Start from the domain that moved the base, if there is one among the earlier."""
        movers = [(d, d.method) for d in earlier if isinstance(d.method, SeriesAdapterJoint)]
        if not movers:
            return
        source, its = movers[0]
        if (its.norms, its.sites) != (self.norms, self.sites):
            raise MethodError(
                f"a domain by {self.name} cannot follow one with other norms or sites; make both "
                f"with norms={its.norms!r} and sites={its.sites!r}"
            )
        given = dict(source.named_transforms())
        for name, transform in domain.named_transforms():
            for leaf, tensor in given[name].stored().items():
                if leaf != "adapter" or self.inherit == "adapters":
                    getattr(transform, leaf).copy_(tensor)
        domain.norms.load_state_dict(source.norms.state_dict())

    def moved(self, base: "Base", domains: Sequence["Domain"]) -> dict[str, Tensor]:
        """V by site."""
        return _moved(base, domains[0])


class MovedLayer(Transform):
    """A transform with a D of W's shape: the layer works with V = W + D."""

    delta: Tensor

    def move(self, site: Site, *, learns: bool) -> None:
        """Start D at zero; a parameter where it learns."""
        # Half-precision weights are learned on in single precision.
        dtype = torch.promote_types(site.dtype, torch.float32)
        delta = torch.zeros(site.shape, dtype=dtype)
        if learns:
            self.register_parameter("delta", nn.Parameter(delta))
        else:
            self.register_buffer("delta", delta)

    def weight_parameters(self) -> list[nn.Parameter]:
        """D, where it learns."""
        return [self.delta] if isinstance(self.delta, nn.Parameter) else []

    def layer_weight(self, base_weight: Tensor) -> Tensor:
        """W + D."""
        return (base_weight + self.delta).to(base_weight.dtype)


class MovedWeight(MovedLayer):
    """One site's D, where there is no adapter."""

    components: ClassVar[Mapping[str, str]] = {"delta": "moved"}
    adapts: ClassVar[bool] = False

    def __init__(self, site: Site, *, learns: bool) -> None:
        super().__init__()
        self.move(site, learns=learns)

    def weight(self, base_weight: Tensor) -> Tensor:
        """V."""
        return self.layer_weight(base_weight)


class MovedAdapter(MovedLayer, Adapter):
    """One site's D, and the adapter that goes after V."""

    components: ClassVar[Mapping[str, str]] = {**Adapter.components, "delta": "moved"}

    def __init__(self, method: SeriesAdapter, site: Site, *, learns: bool) -> None:
        super().__init__(method, site)
        self.move(site, learns=learns)

    def weight(self, base_weight: Tensor) -> Tensor:
        """(I + A S) V."""
        return super().weight(self.layer_weight(base_weight))


def _moved_layer(method: SeriesAdapter, site: Site, *, learns: bool) -> Transform:
    if method.adapts(site):
        return MovedAdapter(method, site, learns=learns)
    return MovedWeight(site, learns=learns)


def _moved_layers(domain: "Domain") -> dict[str, MovedLayer]:
    return {name: t for name, t in domain.named_transforms() if isinstance(t, MovedLayer)}


def _moved(base: "Base", domain: "Domain") -> dict[str, Tensor]:
    found = _moved_layers(domain).items()
    return {name: layer.layer_weight(base.tensor(name)).detach() for name, layer in found}


JOINT_PRESETS: dict[str, Method] = {
    "series-adapter-joint": SeriesAdapterJoint(),
    "series-adapter-n": SeriesAdapterN(),
}
