"""TSA: parallel adapters that start at a little of the identity, and a matrix between features and head.

    W~ = W + A at the centre tap,        z = H (P f) + c

A starts at 1e-4 I: where it is not square, ones on its diagonal, and beside a grouped convolution the same in each
group. P maps the features f to as many, and starts at I. What follows it is linear, so H P is one head: P costs nothing
at inference, and nothing in a pack.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from polymask.core.heads import MappedLinear
from polymask.core.method import Method
from polymask.methods.parallel_adapter import ParallelAdapter, Start


@dataclass(frozen=True, kw_only=True)
class Tsa(ParallelAdapter):
    """Parallel adapters from 1e-4 I, and P unless `map_features` is false.

    P learns at the rate of whole weights. A domain without a head has none.
    """

    start: Start = "identity"
    map_features: bool = True

    title: ClassVar[str] = "TSA"
    reference: ClassVar[str] = "arXiv 2107.00358"
    differences: ClassVar[str] = (
        "The original learns from a few images, in eval mode with the base's norms (`norms='shared'`), by Adadelta, "
        "and classifies by the nearest mean of a class; here a domain has its own norms and a linear head that "
        "learns, before which P adds no more than another way down the gradient. It adapts the 3x3 convolutions in "
        "the blocks of a ResNet-18; here the stem is adapted too, which `exclude` leaves out."
    )

    def head(self, features: int, classes: int, dtype: torch.dtype) -> nn.Linear:
        made = MappedLinear.at_random if self.map_features else super().head
        return made(features, classes, dtype)


PRESETS: dict[str, Method] = {"tsa": Tsa()}
