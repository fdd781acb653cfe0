"""Deep adaptation networks: new filters are linear combinations of the layer's own.

    W~ = P mat(W),        mat(W): C_out rows, one filter each

P is the controller, C_out x C_out ("linear") or diagonal. It is what a 1x1 convolution after the
layer would be. Groups are kept apart: P is one block a group of output channels, so that it mixes
only filters that read the same channels, and of a depthwise convolution it is diagonal anyway.
The projections of query, key and value that `nn.MultiheadAttention` stacks are three blocks.

A site where P would have no fewer numbers than W (of a plain convolution, where C_out >= C_in k²)
stays the base's, bias and all. So no site costs more than its weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from polymask.core.method import Method
from polymask.core.parts import BiasTransform, NormPolicy
from polymask.core.survey import Site


@dataclass(frozen=True, kw_only=True)
class Dan(Method):
    """W~ = P mat(W), and a bias of the domain's own where the base has one.

    `start`: "original" is P = I + diag(N(0, 1)) / C_out; "identity" is the base itself.
    `always` puts a P everywhere, even where it has more numbers than W.
    The scale and shift of the norms stay the base's while their statistics follow the domain.
    """

    norms: NormPolicy = "stats"
    controller: Literal["linear", "diagonal"] = "linear"
    start: Literal["original", "identity"] = "original"
    always: bool = False

    title: ClassVar[str] = "deep adaptation networks"
    reference: ClassVar[str] = "arXiv 1705.04228"
    differences: ClassVar[str] = (
        "The released code touches two-dimensional convolutions only; here linear, attention and transposed layers "
        "have controllers too, and groups a block each. Its low-rank controller and the switch that mixes base and new "
        "weights are not here. On the decathlon it controls every convolution (`always=True`); in a network of many "
        "1x1 convolutions that is larger than fine-tuning, so by default a layer has a controller only where that is "
        "smaller than the layer, the other rule of its code. Its optimiser was YellowFin; here it is the recipe's."
    )
    wider: ClassVar[Mapping[str, Any]] = {"always": True}

    def transform(self, site: Site) -> "Controller | None":
        """A controller; None where it would not be smaller than W and `always` is off."""
        groups, _, rows, _ = _filter_shape(site)
        size = groups * rows * (rows if self.controller == "linear" else 1)
        return Controller(self, site) if self.always or size < site.numel else None


class Controller(BiasTransform):
    """One site's P, as blocks (groups, rows, rows) or a diagonal (groups, rows), and its bias.

    There are C_out / groups rows. The bias is kept as its difference d from the base's.
    """

    components: ClassVar[Mapping[str, str]] = {"controller": "weights", "scale": "scalars", "delta_bias": "bias"}

    controller: nn.Parameter | None
    scale: nn.Parameter | None

    def __init__(self, method: Dan, site: Site) -> None:
        super().__init__()
        self.filter_shape = _filter_shape(site)
        groups, _, rows, _ = self.filter_shape
        dtype = site.learned_dtype
        diagonal = torch.ones(groups, rows, dtype=dtype)
        if method.start == "original":
            diagonal += torch.randn(groups, rows, dtype=dtype) / site.channels
        is_linear = method.controller == "linear"
        self.controller = nn.Parameter(torch.diag_embed(diagonal)) if is_linear else None
        self.scale = None if is_linear else nn.Parameter(diagonal)
        self.begin_bias(site)

    def weight(self, base_weight: Tensor) -> Tensor:
        W = base_weight.reshape(self.filter_shape)
        if self.scale is not None:
            out = self.scale[:, None, :, None] * W
        else:
            assert self.controller is not None
            # Autocast would round W itself; the convolution casts W~ soon enough.
            with torch.autocast(W.device.type, enabled=False):
                W = W.to(self.controller.dtype)
                out = torch.einsum("gop,gipk->giok", self.controller, W)
        return out.reshape(base_weight.shape).to(base_weight.dtype)


def _filter_shape(site: Site) -> tuple[int, int, int, int]:
    """A shape of the weight: (groups, i, C_out / groups, k); a filter is all of its i and k."""
    if site.transposed:
        groups, inputs, outputs, *kernel = site.channel_view
        return groups, inputs, outputs, math.prod(kernel)
    groups = 3 if site.name.endswith("in_proj_weight") else site.groups
    return groups, 1, site.channels // groups, site.numel // site.channels


PRESETS: dict[str, Method] = {"dan": Dan(), "dan-diagonal": Dan(controller="diagonal")}
