"""The baselines that masks are measured against.

Classifier-only: W~ = W, a new head on the base's features. Bn-only: W~ = W, own norms. Finetune: W~ is free and starts
at W, which is what one gets by training a whole network for every domain.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from polymask.core.method import Method
from polymask.core.parts import BiasTransform, NormPolicy
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
        "What is stored is the difference to the base. Parameters that are not weights or biases of layers (a class "
        "token, positions, layer scales) stay the base's."
    )

    def transform(self, site: Site) -> "FreeWeights":
        return FreeWeights(site)


class FreeWeights(BiasTransform):
    """W~ = W + D and b~ = b + d, with D and d learned from zero."""

    components: ClassVar[Mapping[str, str]] = {"weight": "weights", "bias": "bias"}
    stored_names: ClassVar[Mapping[str, str]] = {"delta": "weight", "delta_bias": "bias"}
    learns_weights: ClassVar[bool] = True

    delta: nn.Parameter

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(site.shape, dtype=site.learned_dtype))
        self.begin_bias(site)

    def weight(self, base_weight: Tensor) -> Tensor:
        return (base_weight + self.delta).to(base_weight.dtype)

    def origins(self, base_weight: Tensor, base_bias: Tensor | None) -> list[tuple[nn.Parameter, Tensor]]:
        """W for D, and b for d: what decays is W~, not its change."""
        found = [(self.delta, base_weight)]
        if self.delta_bias is not None and base_bias is not None:
            found.append((self.delta_bias, base_bias))
        return found


PRESETS: dict[str, Method] = {"classifier-only": HeadOnly(), "bn-only": HeadOnly(norms="own"), "finetune": Finetune()}
