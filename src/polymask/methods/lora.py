"""Low-rank updates of linear layers and convolutions: LoRA, and DoRA, which learns sizes and directions apart.

    LoRA:  mat(W~) = mat(W) + (alpha / rank) B A
    DoRA:  mat(W~) = m V / ‖V‖,        V = mat(W) + (alpha / rank) B A,        a row at a time

mat(W) has C_out rows, one filter each; A is rank x (C_in / groups · kernel), B is C_out x rank. It is what a
convolution by the filters A, followed by a 1x1 convolution B, would add. All output channels share A: those of a
grouped convolution apply it to the channels of their own group, so the update of a depthwise convolution is a mix of
`rank` common kernels. The same holds for the stacked projections of `nn.MultiheadAttention` and for a fused qkv layer,
whose three parts share A, and for the input channels of the groups of a transposed convolution.

m has a number for each output channel and starts at the norm of its row, so a fresh domain is the base. A filter of
zeros stays zero. `lora-conv` is what `lora` was called before, and the same method.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from polymask.core.method import Method
from polymask.core.parts import Transform
from polymask.core.survey import Site
from polymask.errors import MethodError


@dataclass(frozen=True, kw_only=True)
class Lora(Method):
    """mat(W~) = mat(W) + (alpha / rank) B A, where B starts at zero.

    A site that has fewer rows or columns than `rank` gets as many as it has: more would add
    nothing. The factor is alpha / rank of the options there too.
    """

    rank: int = 8
    alpha: float = 8.0

    title: ClassVar[str] = "LoRA and DoRA"
    reference: ClassVar[str] = "arXiv 2106.09685"
    differences: ClassVar[str] = (
        "The first LoRA package factors a (C_out k) x (C_in k) matrix of a convolution; here, as in PEFT, it is "
        "C_out x (C_in k k): a convolution to r channels, then a 1x1. It gives the parts of a fused qkv layer an A "
        "each, and can leave some out; here they share A, and none is left out. Every site has an update, not the "
        "attention's alone. No dropout."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_whole("rank")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or self.alpha <= 0:
            raise MethodError(f"alpha={self.alpha!r} must be a positive number")
        object.__setattr__(self, "alpha", float(self.alpha))

    def transform(self, site: Site) -> "LowRank":
        return LowRank(self, site)


@dataclass(frozen=True, kw_only=True)
class Dora(Lora):
    """LoRA of a row's direction, and m, its length.

    The gradient takes ‖V‖ for a constant, as the original does.
    """

    reference: ClassVar[str] = "arXiv 2402.09353"
    differences: ClassVar[str] = (
        "The paper writes the norm over columns of W; its released code and PEFT take it over the inputs of each "
        "output, and so does this. Every site has an update, convolutions too. No dropout."
    )

    def transform(self, site: Site) -> "LowRank":
        return SizedLowRank(self, site)


class MatrixUpdate(Transform):
    """A site as a matrix: C_out rows of C_in / groups · kernel columns, to which something is added."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.rows, self.columns = site.channels, site.numel // site.channels
        # mat(W) as (groups, C_out / groups, i, k): swapping the middle two gives W's own order.
        self.group_shape: tuple[int, ...] = (1, self.rows, 1, self.columns)
        if site.transposed:
            groups, inputs, outputs, *kernel = site.channel_view
            self.group_shape = (groups, outputs, inputs, math.prod(kernel))

    def added(self, base_weight: Tensor, update: Tensor) -> Tensor:
        """W and an update (rows, columns), in the wider of their types."""
        return base_weight + update.view(self.group_shape).transpose(1, 2).reshape(base_weight.shape)


class LowRank(MatrixUpdate):
    """One site's A (rank, columns of mat(W)) and B (C_out, rank)."""

    components: ClassVar[Mapping[str, str]] = {"A": "weights", "B": "weights"}

    def __init__(self, method: Lora, site: Site) -> None:
        super().__init__(site)
        rank = min(method.rank, self.rows, self.columns)
        self.factor = method.alpha / method.rank
        dtype = site.learned_dtype
        bound = 1.0 / math.sqrt(self.columns)  # Kaiming's uniform range, as of torch's own layers
        self.A = nn.Parameter(torch.empty(rank, self.columns, dtype=dtype).uniform_(-bound, bound))
        self.B = nn.Parameter(torch.zeros(self.rows, rank, dtype=dtype))

    def updated(self, base_weight: Tensor) -> Tensor:
        """W + (alpha / rank) B A, in the type that learns."""
        # Autocast would round the update; the convolution casts W~ soon enough.
        with torch.autocast(base_weight.device.type, enabled=False):
            return self.added(base_weight, self.factor * (self.B @ self.A))

    def weight(self, base_weight: Tensor) -> Tensor:
        return self.updated(base_weight).to(base_weight.dtype)


class SizedLowRank(LowRank):
    """One site's A and B, and m (C_out,)."""

    components: ClassVar[Mapping[str, str]] = {**LowRank.components, "magnitude": "scalars"}

    def __init__(self, method: Dora, site: Site) -> None:
        super().__init__(method, site)
        self.channel_view, self.channel_shape = site.channel_view, site.channel_shape
        self.magnitude = nn.Parameter(torch.zeros(self.rows, dtype=site.learned_dtype))

    @torch.no_grad()
    def begin(self, base_weight: Tensor) -> None:
        """Take the norms of W's rows."""
        self.magnitude.copy_(self.norms(base_weight.to(self.magnitude.dtype)).reshape(-1))

    def norms(self, weight: Tensor) -> Tensor:
        """‖V‖ of each output channel, in a shape that broadcasts over `channel_view`."""
        shared = [axis for axis, size in enumerate(self.channel_shape) if size == 1]
        return weight.reshape(self.channel_view).square().sum(shared).view(self.channel_shape).sqrt()

    def weight(self, base_weight: Tensor) -> Tensor:
        V = self.updated(base_weight)
        with torch.autocast(base_weight.device.type, enabled=False):
            norms = self.norms(V.detach()).clamp_min(torch.finfo(V.dtype).tiny)
            factors = self.magnitude.view(self.channel_shape) / norms
            sized = (V.reshape(self.channel_view) * factors).reshape(base_weight.shape)
        return sized.to(base_weight.dtype)

    def scalar_parameters(self) -> list[nn.Parameter]:
        return [self.magnitude]


PRESETS: dict[str, Method] = {"lora": Lora(), "lora-conv": Lora(), "dora": Dora()}
