"""Series adapters: a batch norm and a 1x1 convolution after each convolution, with a way around.

    y = W * x + b,        z = y + A BN(y),        BN(y) = S (y - μ) + β,        S = diag(γ / σ)

A maps the C_out channels of y to themselves, and BN is a norm that the base does not have; the norm that the base has
reads z. While a domain learns, BN uses the statistics of the batch, so all this acts on the layer's output. With the
statistics fixed it folds into the layer:

    W~ = (I + A S) W,        b~ = b + A (S (b - μ) + β)

After a grouped convolution A has the same groups, so it is block-diagonal (after a depthwise one, a number per
channel): otherwise it would not fold into a grouped kernel. Transposed convolutions and parameters that are not the
weight of a layer are left alone.

Series adapters in a network whose own weights learn with them.

    V = W + D,        z = y + A BN(y),        y = V * x + b

D is the same for all domains; A, BN and the norms are each domain's own. `series-adapter-joint` learns D from all
domains together. `series-adapter-n` learns it from the base's own images, since series adapters are made for a network
that was pretrained with adapters in it: a domain of `series-adapter-joint` that learns the base's own images is that
network, and domains that follow it take its D, which stays fixed. Biases are not shared. Sites that get no adapter have
a D too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymask.core.method import Images, Method
from polymask.core.parts import Objective, Transform
from polymask.core.survey import Site
from polymask.errors import MethodError

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain

CONVOLUTIONS = {"conv1d": F.conv1d, "conv2d": F.conv2d, "conv3d": F.conv3d}
_EPSILON = 1e-5  # added to a variance, as batch norms do
_MOMENTUM = 0.1  # of BN's statistics, where the method does not say


@dataclass(frozen=True, kw_only=True)
class SeriesAdapter(Method):
    """z = y + A BN(y) after the layer, then the domain's own norm.

    `sites`: "spatial" adapts the convolutions that are larger than 1x1, as the original does,
    whose network has 3x3 ones only; "conv" also adapts 1x1 ones, where A may be larger than W;
    "all" linear layers too, with BN over their features.
    `start`: "zero" starts at the base, which is what a network from the shelf needs. "he" draws A
    from N(0, 2 / C_out), as the original does, on a network that was pretrained with adapters in
    it and with the recipe `residual-adapters`: elsewhere a random A BN(y) is added
    to layers that do not expect it.
    `decay` is the factor of an L2 penalty on A: it adds decay ‖A‖² / 2 to the loss.
    """

    sites: Literal["spatial", "conv", "all"] = "spatial"
    start: Literal["he", "zero"] = "zero"
    decay: float = 0.0

    title: ClassVar[str] = "series adapters"
    reference: ClassVar[str] = "arXiv 1705.08045"
    differences: ClassVar[str] = (
        "The original adapts a network that was pretrained with adapters in it (`series-adapter-n`) and starts by He's "
        "rule; on a network from the shelf it reports a collapse, so here A starts at zero unless `start='he'`. Its "
        "weight decay is 0.0005, and for `decay` rows 0.002 or 0.005 for domains with few images, by the account of a "
        "public reimplementation; its released code lets that of A reach norms and head too. Here the penalty is on A "
        "alone, 0 and 0.002."
    )
    wider: ClassVar[Mapping[str, Any]] = {"sites": "all"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("decay", 0.0, 1.0)

    def adapts(self, site: Site) -> bool:
        """Whether an adapter goes after this site."""
        if site.name.rpartition(".")[2] != "weight" or not site.own_output:
            return False
        if site.kind == "linear":
            return self.sites == "all"
        return site.kind in CONVOLUTIONS and (site.spatial or self.sites != "spatial")

    def transform(self, site: Site) -> Transform | None:
        return Adapter(self, site) if self.adapts(site) else None

    def objective(self, base: "Base", domain: "Domain", images: Images) -> Objective | None:
        found = [t.adapter for _, t in domain.named_transforms() if isinstance(t, Adapter)]
        return AdapterDecay(self.decay, found) if self.decay and found else None


class AdapterDecay(Objective):
    """decay / 2 times the sum of ‖A‖² over all sites."""

    def __init__(self, decay: float, adapters: Sequence[Tensor]) -> None:
        super().__init__()
        self.decay = decay
        self.adapters = list(adapters)  # the domain's: a list keeps them out of `parameters`

    def forward(self, images: Tensor, features: Tensor) -> Tensor:
        norms = [adapter.float().square().sum() for adapter in self.adapters]
        return self.decay / 2 * torch.stack(norms).sum()


class Adapter(Transform):
    """One site's A (groups, rows, rows) and BN's four tensors (C_out,), C_out = groups rows."""

    components: ClassVar[Mapping[str, str]] = {
        "adapter": "weights",
        "scale": "norm_affine",
        "shift": "norm_affine",
        "running_mean": "norm_statistics",
        "running_var": "norm_statistics",
    }
    acts_on_output: ClassVar[bool] = True

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, method: SeriesAdapter, site: Site) -> None:
        super().__init__()
        self.kind, self.dtype = site.kind, site.dtype
        self.groups, self.rows = site.groups, site.channels // site.groups
        self.momentum = method.norm_momentum or _MOMENTUM
        dtype = site.learned_dtype
        adapter = torch.zeros(self.groups, self.rows, self.rows, dtype=dtype)
        if method.start == "he":
            adapter.normal_(0.0, math.sqrt(2.0 / site.channels))
        self.adapter = nn.Parameter(adapter)
        self.scale = nn.Parameter(torch.ones(site.channels, dtype=dtype))
        self.shift = nn.Parameter(torch.zeros(site.channels, dtype=dtype))
        self.register_buffer("running_mean", torch.zeros(site.channels, dtype=dtype))
        self.register_buffer("running_var", torch.ones(site.channels, dtype=dtype))

    def output(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Y + A BN(y)."""
        normed = self.normed(outputs)
        A = self.adapter.to(normed.dtype)
        if self.kind == "linear":
            return outputs + F.linear(normed, A[0])
        taps = (1,) * (outputs.ndim - 2)
        A = A.reshape(-1, self.rows, *taps)
        return outputs + CONVOLUTIONS[self.kind](normed, A, groups=self.groups)

    def normed(self, outputs: Tensor) -> Tensor:
        """BN(y): by the batch in training mode, which moves the statistics, else by these."""
        y = outputs.reshape(-1, outputs.shape[-1]) if self.kind == "linear" else outputs
        normed = F.batch_norm(
            y, self.running_mean, self.running_var, self.scale, self.shift, self.training, self.momentum, _EPSILON
        )
        return normed.view_as(outputs)

    def affine(self) -> tuple[Tensor, Tensor]:
        """S and o of BN(y) = S y + o with the statistics fixed, each (groups, rows, 1)."""
        slope = self.scale * torch.rsqrt(self.running_var + _EPSILON)
        offset = self.shift - slope * self.running_mean
        return slope.view(self.groups, -1, 1), offset.view(self.groups, -1, 1)

    def weight(self, base_weight: Tensor) -> Tensor:
        """(I + A S) W."""
        slope, _ = self.affine()
        return plus_mixed(base_weight, self.adapter * slope.mT)

    def bias(self, base_bias: Tensor | None) -> Tensor | None:
        """B + A (S b + o), of the site's type."""
        slope, offset = self.affine()
        added = mixed(self.adapter, offset).view(-1).to(self.dtype)
        return added if base_bias is None else plus_mixed(base_bias, self.adapter * slope.mT) + added


def mixed(matrix: Tensor, rows: Tensor) -> Tensor:
    """`matrix` (groups, n, rows) times `rows` (groups, rows, k), exactly even under autocast."""
    if rows.is_meta:  # of a skeleton only shapes matter, and autocast does not know the device
        return matrix @ rows
    with torch.autocast(rows.device.type, enabled=False):
        return matrix @ rows.to(matrix.dtype)


def plus_mixed(tensor: Tensor, *matrices: Tensor) -> Tensor:
    """T + M … T for a tensor T of one row per output channel, the rightmost matrix first."""
    rows = tensor.reshape(matrices[-1].shape[0], matrices[-1].shape[-1], -1)
    product = rows
    for matrix in reversed(matrices):
        product = mixed(matrix, product)
    return (rows + product).view(tensor.shape).to(tensor.dtype)


@dataclass(frozen=True, kw_only=True)
class SeriesAdapterJoint(SeriesAdapter):
    """Adapters of each domain's own after layers that all domains train."""

    title: ClassVar[str] = "series adapters and their network"
    differences: ClassVar[str] = (
        "That the original trains the shared 3x3 kernels from all domains is remembered, not read. An epoch is one "
        "pass over the largest domain, within which the others begin again; in its released loop it ends with the "
        "smallest domain, and sees a part of the others. Every kernel is moved here, 1x1 ones and linear layers too; "
        "biases, which its network has not, are not. The original learns ImageNet as one of its domains; here the "
        "base's own domain is not learned along, and is measured by the base's norms and classifier on the moved "
        "kernels, which costs it points in the decathlon's score."
    )
    joint: ClassVar[bool] = True
    moves_base: ClassVar[bool] = True

    def transform(self, site: Site) -> Transform:
        return _shared_layer(self, site, learns=True)

    def tie(self, domains: Sequence["Domain"]) -> None:
        """Make D of every site one parameter."""
        first = _shared_layers(domains[0])
        for domain in domains[1:]:
            for name, layer in _shared_layers(domain).items():
                layer.delta = first[name].delta

    def moved(self, base: "Base", domains: Sequence["Domain"]) -> dict[str, Tensor]:
        return _shared_weights(base, domains[0])


@dataclass(frozen=True, kw_only=True)
class SeriesAdapterN(SeriesAdapter):
    """Series adapters in a network that was pretrained with adapters in it.

    `fit_all(..., own=)` pretrains it on the base's own images, and refuses to go on without: on
    the base as it is this would be `series-adapter` under another name. By hand: teach a domain of
    `series-adapter-joint` the base's own images, then call `domain.method.follow(domain, [it])` on
    each new domain before that learns; one that has nothing to follow has D = 0.
    `inherit` says what a domain starts with beside D: "norms" takes over BN and the norms and starts with a fresh A, as
    the original does; "adapters" takes over A too.
    """

    inherit: Literal["norms", "adapters"] = "norms"

    differences: ClassVar[str] = (
        "The original pretrains from scratch with adapters in place; here pretraining starts from "
        "the base's weights. It takes the base's own images, and is refused where there are none."
    )
    needs_own: ClassVar[bool] = True
    moves_base: ClassVar[bool] = True
    base_stage: ClassVar[bool] = True

    def transform(self, site: Site) -> Transform:
        return _shared_layer(self, site, learns=False)

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
        return _shared_weights(base, domains[0])


class SharedLayer(Transform):
    """A site's D, of W's shape and the same for all domains: the layer works with V = W + D."""

    components: ClassVar[Mapping[str, str]] = {"delta": "moved"}
    adapts: ClassVar[bool] = False

    delta: Tensor

    def begin_delta(self, site: Site, *, learns: bool) -> None:
        """Start D at zero; a parameter where it learns."""
        delta = torch.zeros(site.shape, dtype=site.learned_dtype)
        self.delta = nn.Parameter(delta) if learns else nn.Buffer(delta)

    def weight_parameters(self) -> list[nn.Parameter]:
        return [self.delta] if isinstance(self.delta, nn.Parameter) else []

    def layer_weight(self, base_weight: Tensor) -> Tensor:
        return (base_weight + self.delta).to(base_weight.dtype)

    def weight(self, base_weight: Tensor) -> Tensor:
        return self.layer_weight(base_weight)


class AdaptedSharedLayer(SharedLayer, Adapter):
    """One site's D, and the adapter that goes after V: W~ = (I + A S) V."""

    components: ClassVar[Mapping[str, str]] = {**Adapter.components, "delta": "moved"}
    adapts: ClassVar[bool] = True

    def weight(self, base_weight: Tensor) -> Tensor:
        return Adapter.weight(self, self.layer_weight(base_weight))


def _shared_layer(method: SeriesAdapter, site: Site, *, learns: bool) -> SharedLayer:
    layer = AdaptedSharedLayer(method, site) if method.adapts(site) else SharedLayer()
    layer.begin_delta(site, learns=learns)
    return layer


def _shared_layers(domain: "Domain") -> dict[str, SharedLayer]:
    return {name: t for name, t in domain.named_transforms() if isinstance(t, SharedLayer)}


def _shared_weights(base: "Base", domain: "Domain") -> dict[str, Tensor]:
    """V by site."""
    layers = _shared_layers(domain).items()
    return {name: layer.layer_weight(base.tensor(name)).detach() for name, layer in layers}


PRESETS: dict[str, Method] = {
    "series-adapter": SeriesAdapter(),
    "series-adapter-decay": SeriesAdapter(decay=0.002),
    "series-adapter-joint": SeriesAdapterJoint(),
    "series-adapter-n": SeriesAdapterN(),
}
