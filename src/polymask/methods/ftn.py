"""FTN: low-rank tensors, a sum of products of vectors, and own norms.

    W~ = W + Σ_r a_r ⊗ b_r ⊗ c_r

over r = 1 … R. a_r has a number for each of W's first dimension (output channels), b_r for each of the second (input
channels of a group) and c_r one for each tap of the kernel. A linear layer and a 1x1 convolution have no c_r: there the
sum is a matrix of rank R, as LoRA's. Of a transposed convolution a_r is for input and b_r for output channels.
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


@dataclass(frozen=True, kw_only=True)
class Ftn(Method):
    """W~ = W + Σ_r a_r ⊗ b_r ⊗ c_r, where a starts at zero and `rank` is R.

    A site gets no more terms than a tensor of its shape can need, the least product of two of its three sizes.
    """

    rank: int = 16

    title: ClassVar[str] = "FTN"
    reference: ClassVar[str] = "arXiv 2310.06124"
    differences: ClassVar[str] = (
        "Its abstract names code that we could not open, and we do not know the ranks of its tables: 16 keeps a domain "
        "of ResNet-50 within the 2 to 6 percent of the network that it speaks of. The start is ours: a is zero, so a "
        "fresh domain is the base, b is drawn as LoRA's A and c with variance 1."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_whole("rank", 1, 4096)

    def transform(self, site: Site) -> "Factors":
        return Factors(self, site)


class Factors(Transform):
    """One site's a (first, R), b (second, R) and, where the kernel has taps, c (taps, R)."""

    components: ClassVar[Mapping[str, str]] = {"a": "weights", "b": "weights", "c": "weights"}

    c: nn.Parameter | None

    def __init__(self, method: Ftn, site: Site) -> None:
        super().__init__()
        first, second, taps = site.shape[0], site.shape[1], math.prod(site.shape[2:])
        rank = min(method.rank, first * second, first * taps, second * taps)
        dtype, bound = site.learned_dtype, 1.0 / math.sqrt(second * taps)
        self.a = nn.Parameter(torch.zeros(first, rank, dtype=dtype))
        self.b = nn.Parameter(torch.empty(second, rank, dtype=dtype).uniform_(-bound, bound))
        c = nn.Parameter(torch.randn(taps, rank, dtype=dtype)) if taps > 1 else None
        self.register_parameter("c", c)

    def weight(self, base_weight: Tensor) -> Tensor:
        # Autocast would round the update; the convolution casts W~ soon enough.
        with torch.autocast(base_weight.device.type, enabled=False):
            columns = self.b if self.c is None else (self.b[:, None] * self.c).flatten(0, 1)  # (second · taps, R)
            update = (self.a @ columns.T).view(base_weight.shape)
        return (base_weight + update).to(base_weight.dtype)


PRESETS: dict[str, Method] = {"ftn": Ftn()}
