"""Parallel adapters: a 1x1 convolution beside each larger one, folded into its kernel.

    W~ = W + A at the centre tap,        so        y = W * x + A * x

A is a 1x1 map of C_in / groups to C_out channels at the convolution's own stride. The two forms of
y agree where the padding is the usual one, half of the (dilated) kernel on each side; with another
padding, A reads the pixel under the kernel's centre. Beside a grouped convolution A has its groups,
so it is block-diagonal: beside a depthwise one, a number per channel.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymask.core.method import Method, Transform
from polymask.core.survey import Site


@dataclass(frozen=True, kw_only=True)
class ParallelAdapter(Method):
    """W~ = W + A at the centre tap.

    `sites`: "spatial" adapts the kernels that are larger than 1x1 and odd in every dimension, as
    the original does, whose network has 3x3 convolutions only. "all" also adapts 1x1 convolutions
    and linear layers, where A is as large as W. A kernel with an even side has no centre tap and
    is left alone by both.
    `start`: "zero" starts at the base. "he" draws A from N(0, 2 / C_out), as the original does: a
    random A perturbs every layer, which takes its 120 epochs (`residual-adapters`) to make up for.
    """

    sites: Literal["spatial", "all"] = "spatial"
    start: Literal["he", "zero"] = "zero"

    title: ClassVar[str] = "parallel adapters"
    reference: ClassVar[str] = "arXiv 1803.10082"
    differences: ClassVar[str] = (
        "The original starts by He's rule (`start='he'`), here A starts at zero: short runs on a "
        "base from the shelf need it. The released code also has dropout on what an adapter "
        "reads, which no change of the weights can express, and a flag that adapts only the "
        "first or second convolution of a block; patterns over sites (`include`, `exclude`) do "
        "that here. The two forms agree where the padding is half the kernel."
    )
    wider: ClassVar[Mapping[str, Any]] = {"sites": "all"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("sites", ("spatial", "all"))
        self.check_choice("start", ("he", "zero"))

    def transform(self, site: Site) -> Transform | None:
        """An adapter; None where the kernel has no centre, or is not to be adapted."""
        kernel = site.shape[2:]
        has_centre = all(side % 2 for side in kernel)
        is_spatial = any(side > 1 for side in kernel)
        wanted = has_centre and (is_spatial or self.sites == "all")
        return CentreTap(self, site) if wanted else None


class CentreTap(Transform):
    """One site's adapter, of W's first two dimensions.

    These are (C_out, C_in / groups); of a transposed convolution (C_in, C_out / groups), where A
    is a transposed 1x1 convolution and, at a stride, reaches only the pixels under a centre.
    """

    components: ClassVar[Mapping[str, str]] = {"adapter": "weights"}

    def __init__(self, method: ParallelAdapter, site: Site) -> None:
        super().__init__()
        kernel = site.shape[2:]
        self.tap_shape = site.shape[:2] + (1,) * len(kernel)
        # F.pad counts from the last dimension, and wants both ends of each.
        self.padding = [side // 2 for side in reversed(kernel) for _ in range(2)]
        # Half-precision weights are learned on in single precision.
        dtype = torch.promote_types(site.dtype, torch.float32)
        adapter = torch.zeros(site.shape[:2], dtype=dtype)
        if method.start == "he":
            adapter.normal_(0.0, math.sqrt(2.0 / site.channels))
        self.adapter = nn.Parameter(adapter)

    def weight(self, base_weight: Tensor) -> Tensor:
        """W + A at the centre tap."""
        return add_at_centre(base_weight, self.adapter, self.tap_shape, self.padding)


def add_at_centre(base_weight: Tensor, adapter: Tensor, tap_shape: tuple[int, ...], padding: list[int]) -> Tensor:
    """W with a 1x1 map added at the centre of its kernel."""
    at_centre = F.pad(adapter.view(tap_shape), padding)
    return (base_weight + at_centre).to(base_weight.dtype)


PRESETS: dict[str, Method] = {"parallel-adapter": ParallelAdapter()}
