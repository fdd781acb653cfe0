"""Series adapters: a batch norm and a 1x1 convolution after each convolution, with a way around.

    y = W * x + b,        z = y + A BN(y),        BN(y) = S (y - μ) + β,        S = diag(γ / σ)

A maps the C_out channels of y to themselves, and BN is a norm that the base does not have; the
norm that the base has reads z. While a domain learns, BN goes by the batch, so all this acts on
the layer's output. With the statistics fixed it folds into the layer:

    W~ = (I + A S) W,        b~ = b + A (S (b - μ) + β)

After a grouped convolution A has its groups, so it is block-diagonal: after a depthwise one, a
number per channel. Otherwise it would fold into no grouped kernel. Transposed convolutions and
parameters that are not the weight of a layer are left alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymask.core.method import Images, Method, Objective, Transform
from polymask.core.survey import Site

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
    it and with the recipe `residual-adapters`: elsewhere A BN(y) drowns y in the deep layers, with
    tens to hundreds of times its variance, and short runs do not recover.
    `decay` is the factor of an L2 penalty on A: it adds decay ‖A‖² / 2 to the loss.
    """

    sites: Literal["spatial", "conv", "all"] = "spatial"
    start: Literal["he", "zero"] = "zero"
    decay: float = 0.0

    title: ClassVar[str] = "series adapters"
    reference: ClassVar[str] = "arXiv 1705.08045"
    differences: ClassVar[str] = (
        "The original adapts a network that was pretrained with adapters in it "
        "(`series-adapter-n`) and starts by He's rule; on a network from the shelf it reports a "
        "collapse, so here A starts at zero unless `start='he'`. Its weight decay is 0.0005, and "
        "for `decay` rows 0.002 or 0.005 for domains with few images, by the account of a public "
        "reimplementation; its released code lets that of A reach norms and head too. Here the "
        "penalty is on A alone, 0 and 0.002."
    )
    wider: ClassVar[Mapping[str, Any]] = {"sites": "all"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("sites", ("spatial", "conv", "all"))
        self.check_choice("start", ("he", "zero"))
        self.check_range("decay", 0.0, 1.0)

    def adapts(self, site: Site) -> bool:
        """Whether an adapter goes after this site."""
        if site.name.rpartition(".")[2] != "weight":
            return False
        if site.kind == "linear":
            return self.sites == "all"
        is_spatial = any(side > 1 for side in site.shape[2:])
        return site.kind in CONVOLUTIONS and (is_spatial or self.sites != "spatial")

    def transform(self, site: Site) -> Transform | None:
        """An adapter; None where none is to be."""
        return Adapter(self, site) if self.adapts(site) else None

    def objective(self, base: "Base", domain: "Domain", images: Images) -> Objective | None:
        """The penalty on A."""
        found = [t.adapter for _, t in domain.named_transforms() if isinstance(t, Adapter)]
        return AdapterDecay(self.decay, found) if self.decay and found else None


class AdapterDecay(Objective):
    """decay / 2 times the sum of ‖A‖² over all sites."""

    def __init__(self, decay: float, adapters: Sequence[Tensor]) -> None:
        super().__init__()
        self.decay = decay
        self.adapters = list(adapters)  # the domain's: a list keeps them out of `parameters`

    def forward(self, images: Tensor, features: Tensor) -> Tensor:
        """The penalty; images and features do not matter."""
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
        # Half-precision weights are learned on in single precision.
        dtype = torch.promote_types(site.dtype, torch.float32)
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
            y,
            self.running_mean,
            self.running_var,
            self.scale,
            self.shift,
            self.training,
            self.momentum,
            _EPSILON,
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


PRESETS: dict[str, Method] = {
    "series-adapter": SeriesAdapter(),
    "series-adapter-decay": SeriesAdapter(decay=0.002),
}
