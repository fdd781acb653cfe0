"""Affine masks below one bit a weight: neighbours share a bit."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from polymask.core.bits import binarize, threshold
from polymask.core.parts import Transform
from polymask.core.survey import Site
from polymask.methods.affine.formula import affine
from polymask.methods.affine.method import Affine, AffineTransform, Coefficient

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain

MOST = 4096  # weights that may share a bit


@dataclass(frozen=True, kw_only=True)
class AffineCoarse(Affine):
    """Affine masks with fewer bits than weights: at most `bits` a weight, shared by neighbours in a filter.

        W~ = k0 W + k1 1 + k2 M + k3 W∘M,        M_(o, i) = B_(o, i // g),        g = ⌈1 / bits⌉

    B is the mask that learns, with one bit for every g weights that follow each other in a filter: for a 3 × 3
    convolution with g = 9, all taps of one input channel. A filter of n weights has ⌈n / g⌉ bits, the last of them for
    what is left. By the chain rule a score's gradient is the sum over its weights. The form is the centred one, so a
    group is pushed up or down, or scaled, against the middle of its layer.
    """

    k0: Coefficient | Literal["auto"] = "learned"
    scores: tuple[float, float] = (-1e-4, 1e-4)
    form: Literal["plain", "centred"] = "centred"
    bits: float = 0.5

    title: ClassVar[str] = "affine masks below one bit a weight"
    reference: ClassVar[str] = "ours"
    differences: ClassVar[str] = (
        "The paper has one bit a weight. Here neighbours in a filter share one; with `bits=1` it is `affine-centred`."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("bits", 1 / MOST, 1.0)

    @property
    def shared_by(self) -> int:
        """g: how many weights share a bit."""
        return ceil(1 / self.bits - 1e-9)

    def transform(self, site: Site) -> "CoarseTransform":
        return CoarseTransform(self, site)

    def together(self, base: "Base", domain: "Domain", out: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        return {}


class CoarseTransform(AffineTransform):
    """One site's scores, of which each is for several weights, and its scalars."""

    refillable: ClassVar[bool] = False

    def __init__(self, method: AffineCoarse, site: Site) -> None:
        super().__init__(method, site)
        self.site_shape, self.shared_by = site.shape, min(method.shared_by, prod(site.shape[1:]))
        self.shape = (site.shape[0], ceil(prod(site.shape[1:]) / self.shared_by))
        scores = torch.empty(self.shape, dtype=self.dtype)
        if not scores.is_meta:
            scores.uniform_(*method.scores)
        self.scores = nn.Parameter(scores)

    def weight(self, base_weight: Tensor) -> Tensor:
        """W~ of the bits, each as often as there are weights that share it."""
        few = self.mask() if self.scores is None else binarize(self.scores, self.at, self.surrogate)
        M = few.repeat_interleave(self.shared_by, 1)[:, : prod(self.site_shape[1:])].reshape(self.view_shape)
        made = affine(base_weight.view(self.view_shape), M, *self.coefficients())
        return made.reshape(self.site_shape)

    def write(self, base_weight: Tensor, out: Tensor) -> Tensor:
        return Transform.write(self, base_weight, out)

    def mask_of(self, scores: Tensor) -> Tensor:
        """B = 1[R >= t], one for each group."""
        return (
            torch.empty(self.shape, dtype=torch.bool, device="meta") if scores.is_meta else threshold(scores, self.at)
        )


PRESETS: dict[str, AffineCoarse] = {"affine-coarse": AffineCoarse()}
