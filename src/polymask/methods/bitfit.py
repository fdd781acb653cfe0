"""BitFit: biases alone.

    W~ = W,        b~ = b + d

d has a number for each output channel of a layer that has a bias. The shift of every norm is a bias too, and is the
domain's own; its scale and statistics stay the base's (`norms="bias"`). A recipe with own norms, where methods gather
statistics of a domain's images, gives it own statistics too (`norms="shift"`).

A convolution of a ResNet has no bias, and a batch norm follows it: there the shifts of the norms are all that learns.
With the base's statistics these are as good as biases of the convolutions would be, since

    γ (y + d - μ) / σ + β = γ (y - μ) / σ + (β + γ d / σ).

A layer without a bias that no norm follows is left as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polymask.core.method import Method
from polymask.core.parts import BiasTransform, NormPolicy
from polymask.core.survey import Site


@dataclass(frozen=True, kw_only=True)
class BitFit(Method):
    """b~ = b + d; norms have own shifts."""

    norms: NormPolicy = "bias"

    title: ClassVar[str] = "BitFit"
    reference: ClassVar[str] = "arXiv 2106.10199"
    differences: ClassVar[str] = (
        "The original is for language models, whose norms have no statistics. Here those of batch norms stay the "
        "base's, unless the recipe asks for own norms; with `norms='own'` a domain has own scales too. What is stored "
        "is the change of a bias."
    )
    leaves_sites: ClassVar[bool] = True

    def transform(self, site: Site) -> "BiasAlone | None":
        return BiasAlone(site) if site.has_bias else None


class BiasAlone(BiasTransform):
    """One site's d (C_out,)."""

    components: ClassVar[Mapping[str, str]] = {"bias": "bias"}
    stored_names: ClassVar[Mapping[str, str]] = {"delta_bias": "bias"}

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.begin_bias(site)

    @property
    def keeps_weight(self) -> bool:
        return True

    def weight(self, base_weight: Tensor) -> Tensor:
        return base_weight


PRESETS: dict[str, Method] = {"bitfit": BitFit()}
