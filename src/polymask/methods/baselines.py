"""The baselines that masks are measured against.

Classifier-only: W~ = W, a new head on the base's features. Bn-only: W~ = W, own norms. Finetune:
W~ free, starting at W; what one gets by training a whole network for every domain.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from polymask.core.method import Method, NormPolicy, Stored, Transform
from polymask.core.precision import learned_type
from polymask.core.survey import Site


@dataclass(frozen=True, kw_only=True)
class HeadOnly(Method):
    """No site is transformed; `norms` decides between classifier-only and bn-only."""

    norms: NormPolicy = "shared"

    title: ClassVar[str] = "baselines"
    reference: ClassVar[str] = "arXiv 1701.07275"
    differences: ClassVar[str] = "None that matters: a head on frozen features, with the base's norms or with own ones."
    leaves_sites: ClassVar[bool] = True

    def transform(self, site: Site) -> None:
        """Leave every site as the base has it."""


@dataclass(frozen=True, kw_only=True)
class Finetune(Method):
    """Every weight and bias of every site is the domain's own."""

    title: ClassVar[str] = "baselines"
    reference: ClassVar[str] = "arXiv 2103.13894"
    differences: ClassVar[str] = (
        "What is stored is the difference to the base. Parameters that are no weights or biases "
        "of layers (a class token, positions, layer scales) stay the base's."
    )

    def transform(self, site: Site) -> "FreeWeights":
        """A weight, and a bias where the base has one, that start at the base's."""
        return FreeWeights(site)


class FreeWeights(Transform):
    """W~ = W + D and b~ = b + d, with D and d learned from zero."""

    components: ClassVar[Mapping[str, str]] = {"weight": "weights", "bias": "bias"}
    learns_weights: ClassVar[bool] = True

    delta: nn.Parameter
    delta_bias: nn.Parameter | None

    def __init__(self, site: Site) -> None:
        super().__init__()
        dtype = learned_type(site.dtype)
        self.register_parameter("delta", nn.Parameter(torch.zeros(site.shape, dtype=dtype)))
        bias = torch.zeros(site.channels, dtype=dtype)
        self.register_parameter("delta_bias", nn.Parameter(bias) if site.has_bias else None)

    def weight(self, base_weight: Tensor) -> Tensor:
        """W + D."""
        return (base_weight + self.delta).to(base_weight.dtype)

    def bias(self, base_bias: Tensor | None) -> Tensor | None:
        """B + d."""
        if base_bias is None or self.delta_bias is None:
            return None
        return (base_bias + self.delta_bias).to(base_bias.dtype)

    def origins(self, base_weight: Tensor, base_bias: Tensor | None) -> list[tuple[nn.Parameter, Tensor]]:
        """W for D, and b for d: what decays is W~, not its change."""
        found = [(self.delta, base_weight)]
        if self.delta_bias is not None and base_bias is not None:
            found.append((self.delta_bias, base_bias))
        return found

    def stored(self) -> dict[str, Stored]:
        """D and d."""
        named = {"weight": self.delta, "bias": self.delta_bias}
        return {name: delta.detach() for name, delta in named.items() if delta is not None}

    def restore(self, stored: Mapping[str, Stored]) -> None:
        """Keep D and d, frozen."""
        for name, place in (("weight", "delta"), ("bias", "delta_bias")):
            if name in stored:
                tensor = stored[name]
                assert isinstance(tensor, Tensor)
                self.register_parameter(place, nn.Parameter(tensor, requires_grad=False))


PRESETS: dict[str, Method] = {
    "classifier-only": HeadOnly(),
    "bn-only": HeadOnly(norms="own"),
    "finetune": Finetune(),
}
