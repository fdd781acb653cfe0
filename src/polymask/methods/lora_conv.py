"""Low-rank updates of convolutions and linear layers.

    mat(W~) = mat(W) + (alpha / rank) B A

mat(W) has C_out rows, one filter each; A is rank x (C_in / groups · kernel), B is C_out x rank. It is what a
convolution by the filters A, followed by a 1x1 convolution B, would add. All output channels share A: those of a
grouped convolution apply it to the channels of their own group, so the update of a depthwise convolution is a mix of
`rank` common kernels. The same holds for the stacked projections of `nn.MultiheadAttention`, and for the input channels
of the groups of a transposed convolution.
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
class LoraConv(Method):
    """mat(W~) = mat(W) + (alpha / rank) B A, where B starts at zero.

    A site that has fewer rows or columns than `rank` gets as many as it has: more would add
    nothing. The factor is alpha / rank of the options there too.
    """

    rank: int = 8
    alpha: float = 8.0

    title: ClassVar[str] = "LoRA for convolutions"
    reference: ClassVar[str] = "arXiv 2106.09685"
    differences: ClassVar[str] = (
        "The first LoRA package factors a (C_out k) x (C_in k) matrix; here, as in PEFT, it is "
        "C_out x (C_in k k): a convolution to r channels, then a 1x1. No dropout."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_whole("rank")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or self.alpha <= 0:
            raise MethodError(f"alpha={self.alpha!r} must be a positive number")
        object.__setattr__(self, "alpha", float(self.alpha))

    def transform(self, site: Site) -> "LowRank":
        return LowRank(self, site)


class LowRank(Transform):
    """One site's A (rank, columns of mat(W)) and B (C_out, rank)."""

    components: ClassVar[Mapping[str, str]] = {"A": "weights", "B": "weights"}

    def __init__(self, method: LoraConv, site: Site) -> None:
        super().__init__()
        rows, columns = site.channels, site.numel // site.channels
        rank = min(method.rank, rows, columns)
        self.factor = method.alpha / method.rank
        # mat(W) as (groups, C_out / groups, i, k): swapping the middle two gives W's own order.
        self.group_shape: tuple[int, ...] = (1, rows, 1, columns)
        if site.transposed:
            groups, inputs, outputs, *kernel = site.channel_view
            self.group_shape = (groups, outputs, inputs, math.prod(kernel))
        dtype = site.learned_dtype
        bound = 1.0 / math.sqrt(columns)  # Kaiming's uniform range, as of torch's own layers
        self.A = nn.Parameter(torch.empty(rank, columns, dtype=dtype).uniform_(-bound, bound))
        self.B = nn.Parameter(torch.zeros(rows, rank, dtype=dtype))

    def weight(self, base_weight: Tensor) -> Tensor:
        """W + (alpha / rank) B A."""
        # Autocast would round the update; the convolution casts W~ soon enough.
        with torch.autocast(base_weight.device.type, enabled=False):
            update = self.factor * (self.B @ self.A)
        update = update.view(self.group_shape).transpose(1, 2).reshape(base_weight.shape)
        return (base_weight + update).to(base_weight.dtype)


PRESETS: dict[str, Method] = {"lora-conv": LoraConv()}
