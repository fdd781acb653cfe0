"""BitDelta: the signs of a change of the weights, and one size for all of them.

    W~ = W + α (2M - 1),        b~ = b + d

M is the mask, α one scalar of the site, d the change of its bias where the base has one. Of a
network W' that somebody fine-tuned from W, with Δ = W' - W of n weights, the nearest such W~ has

    M = 1[Δ > 0],        α = <Δ, 2M - 1> / n = mean |Δ|,

since ‖Δ - α(2M - 1)‖² = ‖Δ‖² - 2α <Δ, 2M - 1> + α² n. This is the affine transform with k0 = 1,
k1 = -α, k2 = 2α, k3 = 0. `polymask.conversion` reads it off a checkpoint. A fresh domain learns it
instead: α starts at 0, so that W~ = W, and the mask learns by scores, as affine masks do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from polymask.binarize import binarize, threshold
from polymask.bits import Bits
from polymask.methods.method import Method, Stored, Transform
from polymask.survey import Site


@dataclass(frozen=True, kw_only=True)
class BitDelta(Method):
    """W~ = W + α (2M - 1), one α a site; `scores` is the range that the scores are drawn from."""

    scores: tuple[float, float] = (1e-4, 2e-4)

    title: ClassVar[str] = "BitDelta"
    reference: ClassVar[str] = "arXiv 2402.10193"
    differences: ClassVar[str] = (
        "The original converts language models and does not learn the signs; a new domain here "
        "does. "
        "The change of a bias is kept whole. `polymask convert` also gathers the statistics of "
        "batch norms again, which language models do not have."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_interval("scores")

    def transform(self, site: Site) -> "BitDeltaTransform":
        """Scores for every weight of the site, its α, and d where the base has a bias."""
        return BitDeltaTransform(self, site)


class BitDeltaTransform(Transform):
    """One site's scores (or, stored, its packed mask), α (1,) and d (channels,)."""

    components: ClassVar[Mapping[str, str]] = {"mask": "mask", "alpha": "scalars", "bias": "bias"}

    alpha: nn.Parameter
    scores: nn.Parameter | None
    words: Tensor | None
    delta_bias: nn.Parameter | None

    def __init__(self, method: BitDelta, site: Site) -> None:
        super().__init__()
        self.shape = site.shape
        # Half-precision weights are learned on in single precision.
        dtype = site.dtype if site.dtype == torch.float64 else torch.float32
        self.alpha = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.scores = nn.Parameter(torch.empty(site.shape, dtype=dtype).uniform_(*method.scores))
        self.register_buffer("words", None)
        bias = nn.Parameter(torch.zeros(site.channels, dtype=dtype)) if site.has_bias else None
        self.register_parameter("delta_bias", bias)

    def weight(self, base_weight: Tensor) -> Tensor:
        """W + α (2M - 1)."""
        M = self.mask().to(self.alpha.dtype) if self.scores is None else binarize(self.scores)
        return (base_weight + self.alpha * (2 * M - 1)).to(base_weight.dtype)

    def bias(self, base_bias: Tensor | None) -> Tensor | None:
        """B + d."""
        if base_bias is None or self.delta_bias is None:
            return None
        return (base_bias + self.delta_bias).to(base_bias.dtype)

    def mask(self) -> Tensor:
        """M as a boolean tensor."""
        if self.scores is not None:
            return threshold(self.scores.detach(), 0.0)
        assert self.words is not None
        return Bits(self.words, self.shape).unpack()

    def stored(self) -> dict[str, Stored]:
        """The mask's bits, α and d."""
        bits = Bits.of(self.mask()) if self.words is None else Bits(self.words, self.shape)
        stored: dict[str, Stored] = {"mask": bits, "alpha": self.alpha.detach()}
        if self.delta_bias is not None:
            stored["bias"] = self.delta_bias.detach()
        return stored

    def restore(self, stored: Mapping[str, Stored]) -> None:
        """Drop the scores and keep the bits."""
        for name, value in stored.items():
            if isinstance(value, Bits):
                self.words = value.words
            else:
                place = "delta_bias" if name == "bias" else name
                self.register_parameter(place, nn.Parameter(value, requires_grad=False))
        self.scores = None


def nearest(delta: Tensor) -> tuple[Tensor, Tensor]:
    """The mask (bool, of Δ's shape) and the α (1,) for which α (2M - 1) is nearest to Δ."""
    return delta > 0, delta.double().abs().mean().reshape(1).to(delta.dtype)


PRESETS: dict[str, Method] = {"bitdelta": BitDelta()}
