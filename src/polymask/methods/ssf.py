"""SSF: a scale and a shift of every channel after every layer, folded into the layer.

    y~ = (1 + g)∘y + s,        y = W * x + b,        so        W~ = (1 + g) W,        b~ = (1 + g) b + s

g and s have a number for each output channel of a site, and start at zero: a fresh domain is the base. A scale and a
shift after a norm are that norm's own scale and shift, which every domain has (`norms`). A layer that has no bias gets
one. Where a batch norm follows a layer and nothing else reads it, that norm takes g and s out again while it learns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from polymask.core.method import Method
from polymask.core.parts import Transform
from polymask.core.survey import Site


@dataclass(frozen=True, kw_only=True)
class Ssf(Method):
    """W~ = (1 + g) W and b~ = (1 + g) b + s.

    g and s are drawn from N(0, `spread`²); 0 starts at the base.
    """

    spread: float = 0.0

    title: ClassVar[str] = "SSF"
    reference: ClassVar[str] = "arXiv 2210.08823"
    differences: ClassVar[str] = (
        "The original draws scales from N(1, 0.02²) and shifts from N(0, 0.02²) (`spread=0.02`); here both start at "
        "the base. After a norm its scale and shift are the norm's own. Its networks have layer norms; on a network "
        "with batch norms, own statistics are gathered too (`norms='affine'` keeps the base's). Three separate "
        "projections of `nn.MultiheadAttention` share one bias, which stays as it is: they get scales alone."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("spread", 0.0, 1.0)

    def transform(self, site: Site) -> "ScaleShift":
        return ScaleShift(site, self.spread)


class ScaleShift(Transform):
    """One site's g (C_out,), and s (C_out,) where it can take a bias."""

    components: ClassVar[Mapping[str, str]] = {"gain": "scalars", "shift": "bias"}

    shift: nn.Parameter | None

    def __init__(self, site: Site, spread: float) -> None:
        super().__init__()
        self.channel_view, self.channel_shape, self.dtype = site.channel_view, site.channel_shape, site.dtype
        self.gain = nn.Parameter(spread * torch.randn(site.channels, dtype=site.learned_dtype))
        shift = nn.Parameter(spread * torch.randn(site.channels, dtype=site.learned_dtype))
        self.register_parameter("shift", shift if site.takes_bias else None)

    def weight(self, base_weight: Tensor) -> Tensor:
        scale = (1 + self.gain).view(self.channel_shape)
        return (base_weight.reshape(self.channel_view) * scale).reshape(base_weight.shape).to(base_weight.dtype)

    def bias(self, base_bias: Tensor | None) -> Tensor | None:
        if self.shift is None:
            return None
        shifted = self.shift if base_bias is None else (1 + self.gain) * base_bias + self.shift
        return shifted.to(self.dtype)


PRESETS: dict[str, Method] = {"ssf": Ssf()}
