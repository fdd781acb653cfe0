"""MTAN: one network that all domains train together, and attention of each domain on its maps.

    a_j = sigmoid(BN(A'_j * ReLU(BN(A_j * [g_j, f_{j-1}]))))        a mask in (0, 1) of g_j's shape
    f_j = ReLU(BN(S_j * (a_j ∘ g_j)))                               max-pooled to g_{j+1}'s size

g_0 is the map that enters the first block, g_1 … g_J are those at the end of each stage; the first
mask sees g_0 alone. A_j and A'_j are 1x1 convolutions of the domain's own, S_j a 3x3 convolution
that all domains share; it gives f_j the channels of g_{j+1}, and f_J those of g_J. f_J takes g_J's
place in the rest of the network, whose weights are W + D with one D for all domains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymask.core.blocks import find_blocks, passes_maps, stage_ends
from polymask.core.method import Method
from polymask.core.network import owner_of
from polymask.core.parts import Route
from polymask.core.survey import Site, learned_type
from polymask.errors import BaseError
from polymask.methods.shared_weights import SharedWeights

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain


@dataclass(frozen=True, kw_only=True)
class Mtan(Method):
    """Attention on the maps of a network that is trained for all domains at once.

    Domains learn together by `fit_all`; one that is made alone has the network for itself.
    """

    title: ClassVar[str] = "MTAN"
    reference: ClassVar[str] = "arXiv 1803.10704"
    differences: ClassVar[str] = (
        "The original trains the network from scratch, here it starts at the base. Its batch norms are shared, and one "
        "more epoch of training on a domain fits them to it before it is tested; here the network's norms are each "
        "domain's own, and those after the shared 3x3 convolutions share scale and shift but not statistics. "
        "Convolutions that a batch norm follows have no bias. The last mask is at the end of the last stage, before a "
        "final norm where the network has one. Domains take turns batch by batch, not epoch by epoch, and an epoch is "
        "one pass over the largest of them, within which the others begin again. The original learns ImageNet as one "
        "of its domains; here the base's own domain is not learned along, and is measured by the base's classifier on "
        "the moved network without attention, which costs it points in the decathlon's score."
    )
    mergeable: ClassVar[bool] = False
    moves_base: ClassVar[bool] = True
    joint: ClassVar[bool] = True

    def transform(self, site: Site) -> SharedWeights:
        return SharedWeights(site)

    def route(self, base: "Base") -> "AttentionRoute":
        return AttentionRoute(base)

    def tie(self, domains: Sequence["Domain"]) -> None:
        """One D and one S for all; attention, norms and all statistics stay each domain's."""
        first, *others = domains
        for other in others:
            _share(first.transforms, other.transforms)
            for source, target in zip(_shared(first), _shared(other), strict=True):
                _share(source, target)

    def moved(self, base: "Base", domains: Sequence["Domain"]) -> dict[str, Tensor]:
        """The network's weights and biases, which are the same in all domains."""
        own = {name for _, norm in domains[0].named_norms() for name in norm.in_layer(base)}
        return {name: t.detach() for name, t in domains[0].weights(base).items() if name not in own}


class AttentionRoute(Route):
    """A domain's attention modules, in the order in which maps reach them."""

    def __init__(self, base: "Base") -> None:
        super().__init__()
        blocks = list(takewhile(partial(passes_maps, base), find_blocks(base)))
        if not blocks:
            raise BaseError(
                f"base {base.name} has no chain of blocks that pass feature maps (C, H, W), which "
                "the attention of mtan is made for; use a convolutional network, or another method"
            )
        ends = stage_ends(blocks)
        self.entry, self.ends = blocks[0].name, tuple(block.name for block in ends)
        self.has_stem = blocks[0].input_shape != base.input.shape  # no mask on the images
        channels = [block.output_shape[0] for block in ends]
        if self.has_stem:
            channels.insert(0, blocks[0].input_shape[0])
        dtype = learned_type(base.weight_dtype)
        self.attention = nn.ModuleList(
            Attention(inputs, inputs if j else 0, outputs, dtype)
            for j, (inputs, outputs) in enumerate(zip(channels, [*channels[1:], channels[-1]], strict=True))
        )

    def component(self, name: str) -> str:
        """Statistics are each domain's own, of the convolutions that domains share too."""
        component = super().component(name)
        return "shared" if component == "weights" and ".shared." in name else component

    def features(self, base: "Base", weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """The network with f_J in g_J's place."""
        attended: list[Tensor] = []

        def follow(g: Tensor) -> None:
            attention = self.attention[len(attended)]
            attended.append(attention(g, attended[-1] if attended else None))

        def enter(block: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
            follow(inputs[0])
            return leave(block, inputs, output) if self.entry in self.ends else None

        def leave(block: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            follow(output)
            # A copy: the network may write to what it gets, and gradients need the original.
            return (attended[-1] if len(attended) == len(self.attention) else output).clone()

        hooks = dict.fromkeys(self.ends, leave)
        with base.hooked(hooks | ({self.entry: enter} if self.has_stem else {})):
            return base.run(weights, images)


class Attention(nn.Module):
    """g_j (N, C, H, W) and f_{j-1} (N, C, H', W') -> f_j (N, C', H, W)."""

    shared: nn.Sequential

    def __init__(self, channels: int, before: int, after: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.mask = nn.Sequential(
            _convolution(channels + before, channels, 1, dtype),
            nn.BatchNorm2d(channels, dtype=dtype),
            nn.ReLU(),
            _convolution(channels, channels, 1, dtype),
            nn.BatchNorm2d(channels, dtype=dtype),
            nn.Sigmoid(),
        )
        self.shared = nn.Sequential(
            _convolution(channels, after, 3, dtype), nn.BatchNorm2d(after, dtype=dtype), nn.ReLU()
        )

    def forward(self, g: Tensor, f: Tensor | None) -> Tensor:
        """ReLU(BN(S * (a ∘ g))), before it is pooled, in the type of g."""
        maps = g.to(self.dtype)
        seen = maps
        if f is not None:
            seen = torch.cat([maps, F.adaptive_max_pool2d(f.to(self.dtype), g.shape[2:])], 1)
        out: Tensor = self.shared(self.mask(seen) * maps)
        return out.to(g.dtype)


def _convolution(inputs: int, outputs: int, kernel: int, dtype: torch.dtype) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, dtype=dtype)
    nn.init.xavier_uniform_(layer.weight, gain=2**0.5)
    return layer


def _shared(domain: "Domain") -> list[nn.Sequential]:
    assert isinstance(domain.route, AttentionRoute)
    return [cast(Attention, attention).shared for attention in domain.route.attention]


def _share(source: nn.Module, target: nn.Module) -> None:
    """Make the target's parameters the source's own."""
    for name, parameter in source.named_parameters():
        owner, leaf = owner_of(target, name)
        owner.register_parameter(leaf, parameter)


PRESETS: dict[str, Method] = {"mtan": Mtan()}
