"""BitDelta: the signs of what fine-tuning changed, and one size for all of them, or one a row or column.

    W~ = W + α (2M - 1),        b~ = b + d

M is the mask, α one scalar of the site, d the change of its bias where the base has one. Of a
network W' that was fine-tuned from W, with Δ = W' - W of n weights, the nearest such W~ has

    M = 1[Δ > 0],        α = <Δ, 2M - 1> / n = mean |Δ|,

since ‖Δ - α(2M - 1)‖² = ‖Δ‖² - 2α <Δ, 2M - 1> + α² n. This is the affine transform with k0 = 1,
k1 = -α, k2 = 2α, k3 = 0, with a mask that is read off instead of learned.

`bitdelta-row` has an α for each output channel and `bitdelta-column` one for each input channel:
each is the mean |Δ| over its own weights, which by the same sum is nearest. An input channel of a
grouped convolution is one of the tensor that enters it, as read by the filters of its group.

A domain learns in two stages, which share one budget of epochs. First all weights are fine-tuned.
Then their change becomes signs and sizes, the signs are fixed, and α, biases, norms and head learn
on. There α = α₀ e^(gθ) with θ from 0: sizes differ by orders of magnitude between sites, and a step
of θ is a step of α in proportion. `polymask.conversion.convert` starts from a checkpoint instead.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from polymask.core.bits import Bits
from polymask.core.method import Images, Method, Stage
from polymask.core.parts import BiasTransform, BitsTransform, Stored, Transform
from polymask.core.survey import Site
from polymask.methods.baselines import FreeWeights

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain

Per = Literal["layer", "row", "column"]
Shapes = tuple[tuple[int, ...], tuple[int, ...]]  # of W and of its sizes, so that these broadcast
GAIN = 100.0  # g: at a rate of 3e-4 a step moves α by 3 percent, as converting does


@dataclass(frozen=True, kw_only=True)
class BitDelta(Method):
    """Fine-tune, take signs and sizes, refine.

    `per` is what shares one size: a layer, a row (an output channel) or a column (an input channel).
    `stage` is set by training: a new domain begins with "weights", what is stored has "signs".
    `tuning` is the share of the epochs that fine-tuning takes; the rest refines.
    """

    per: Per = "layer"
    stage: Literal["weights", "signs"] = "signs"
    tuning: float = 2 / 3

    title: ClassVar[str] = "BitDelta"
    reference: ClassVar[str] = "arXiv 2402.10193, 2512.19720"
    differences: ClassVar[str] = (
        "The original converts language models and refines the sizes alone, by distillation: `polymask convert` does "
        "that with a checkpoint. A domain that is learned refines its sizes, biases, norms and head by the labels, as "
        "every other method here learns. The change of a bias is kept whole. `polymask convert` also gathers the "
        "statistics of batch norms again, which language models do not have. Sizes a row or a column are 2512.19720's, "
        "which keeps them in 16 bits; here they have 32 bits."
    )
    retired: ClassVar[tuple[str, ...]] = ("scores",)  # of a variant that learned its signs

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("tuning", 0.0, 1.0)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Fine-tuning, then refining, at the same rates."""
        return (Stage(self.tuning), Stage(1 - self.tuning))

    def first_stage(self) -> "BitDelta":
        return replace(self, stage="weights")

    def transform(self, site: Site) -> Transform:
        """Whole weights to fine-tune, or their signs, a size and d where the base has a bias."""
        return FreeWeights(site) if self.stage == "weights" else SignsTransform(site, self.per)

    def next_stage(self, base: "Base", domain: "Domain", images: Images) -> "Domain | None":
        """Signs and sizes in place of the weights that were fine-tuned."""
        if self.stage == "signs":
            return None
        following = domain.rebuilt(base, replace(self, stage="signs"))
        tuned = dict(domain.named_transforms())
        for name, transform in following.named_transforms():
            cast(SignsTransform, transform).take(cast(FreeWeights, tuned[name]))
        return following


class SignsTransform(BitsTransform, BiasTransform):
    """One site's packed signs, α (sizes,) and d (channels,); while refining, θ (sizes,) too."""

    components: ClassVar[Mapping[str, str]] = {"mask": "mask", "alpha": "scalars", "bias": "bias"}

    alpha: Tensor
    theta: nn.Parameter | None

    def __init__(self, site: Site, per: Per) -> None:
        super().__init__()
        self.shape = site.shape
        self.shapes = shapes_for(site, per)
        sizes = math.prod(self.shapes[1])
        self.register_buffer("alpha", torch.zeros(sizes, dtype=site.learned_dtype))
        self.theta = nn.Parameter(torch.zeros(sizes, dtype=site.learned_dtype))
        self.register_buffer("words", Bits.of(torch.zeros(site.shape, dtype=torch.bool)).words)
        self.begin_bias(site)

    @torch.no_grad()
    def take(self, free: FreeWeights) -> None:
        """The signs and the sizes of a change, and the change of the bias whole."""
        mask, alpha = nearest(free.delta, self.shapes)
        self.words = Bits.of(mask).words.to(self.alpha.device)
        self.alpha.copy_(alpha)
        if self.delta_bias is not None and free.delta_bias is not None:
            self.delta_bias.copy_(free.delta_bias)

    def size(self) -> Tensor:
        """α as it is now."""
        return self.alpha if self.theta is None else self.alpha * torch.exp(GAIN * self.theta)

    def spread(self, sizes: Tensor) -> Tensor:
        """Sizes (sizes,) in a shape that broadcasts over W."""
        of_weight, of_sizes = self.shapes
        shaped = sizes.view(of_sizes)
        return shaped if of_weight == self.shape else shaped.expand(of_weight).reshape(self.shape)

    def scalar_parameters(self) -> list[nn.Parameter]:
        return [] if self.theta is None else [self.theta]

    def weight(self, base_weight: Tensor) -> Tensor:
        alpha = self.size()
        M = self.mask().to(alpha.dtype)
        return (base_weight + self.spread(alpha) * (2 * M - 1)).to(base_weight.dtype)

    def stored(self) -> dict[str, Stored]:
        bias = {} if self.delta_bias is None else {"bias": self.delta_bias.detach()}
        return super().stored() | {"alpha": self.size().detach()} | bias

    def restore(self, stored: Mapping[str, Stored]) -> None:
        super().restore(stored)
        self.alpha, self.theta = cast(Tensor, stored["alpha"]), None
        if "bias" in stored:
            self.delta_bias = nn.Parameter(cast(Tensor, stored["bias"]), requires_grad=False)


def shapes_for(site: Site, per: Per) -> Shapes:
    """A shape of the weight, and one of the sizes that broadcasts over it."""
    ones = (1,) * (len(site.shape) - 2)
    if per == "row":
        return site.channel_view, site.channel_shape
    if per == "layer":
        return site.shape, (1, 1, *ones)
    if site.transposed:
        return site.shape, (site.shape[0], 1, *ones)
    outputs, inputs, *kernel = site.shape
    if site.groups == 1:
        return site.shape, (1, inputs, *ones)
    return (site.groups, outputs // site.groups, inputs, *kernel), (site.groups, 1, inputs, *ones)


def nearest(delta: Tensor, shapes: Shapes | None = None) -> tuple[Tensor, Tensor]:
    """The mask (bool, of Δ's shape) and the α (sizes,) for which α (2M - 1) is nearest to Δ; by default one α."""
    of_weight, of_sizes = shapes or (delta.shape, (1,) * delta.ndim)
    shared = [axis for axis, size in enumerate(of_sizes) if size == 1]
    sizes = delta.double().abs().reshape(of_weight).mean(shared) if shared else delta.double().abs()
    return delta > 0, sizes.reshape(-1).to(delta.dtype)


PRESETS: dict[str, Method] = {
    "bitdelta": BitDelta(),
    "bitdelta-row": BitDelta(per="row"),
    "bitdelta-column": BitDelta(per="column"),
}
