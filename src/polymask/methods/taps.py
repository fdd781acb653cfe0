"""TAPS: a gate a layer decides which layers are the domain's own.

    W~ = W + 1[s >= t] D,        b~ = b + 1[s >= t] d,        loss + λ / L Σ |s|

D and d are free changes of a site's weight and bias, learned from zero; s is one number for each of L sites. The
gradient passes the gate as if it were s itself: dE/ds = <dE/dW~, D>. The last term pulls every s down, so a layer stays
open only where its change helps. Of a layer whose gate is closed in the end nothing is stored: it is the base's.

What a domain takes is known once it has learned. The bits in tables of methods are those of a domain whose gates are
all open, the most that it can be; what `learn` reports and a benchmark's tables count what is there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from polymask.core.method import Images, Method
from polymask.core.parts import Objective, Stored
from polymask.core.survey import Site
from polymask.errors import MethodError
from polymask.methods.baselines import FreeWeights

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain


@dataclass(frozen=True, kw_only=True)
class Taps(Method):
    """W~ = W + 1[s >= `threshold`] D, where s starts at `start`.

    `sparsity` is λ. D learns at the recipe's rate of whole weights, s at that of scalars. A step of Adam moves s by
    about its rate, so how many steps it takes to close a gate hangs on `start` and the rate: `distance` counts them,
    and sets `start` by the recipe's rate. None leaves `start` as it is: with rates that suit D, a few hundred steps
    of Adam are then too few to close any gate.
    """

    sparsity: float = 1.0
    threshold: float = 0.1
    start: float = 0.15
    distance: float | None = 50.0

    title: ClassVar[str] = "TAPS"
    reference: ClassVar[str] = "arXiv 2203.16708"
    differences: ClassVar[str] = (
        "The released code adds the term after two epochs, and takes the mean over 52 layers of ResNet-50; here it is "
        "there from the first step, over all sites. It learns by SGD, which moves s by its gradient; the recipes here "
        "learn by Adam, whose steps are all of about one size (`distance`). The change of a bias has its layer's gate. "
        "Norms are own, gates or not."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("sparsity", 0.0, 1e6)
        self.check_range("threshold", -1e3, 1e3)
        self.check_range("start", -1e3, 1e3)
        if self.distance is not None:
            self.check_range("distance", 0.0, 1e6)
        if self.start < self.threshold:
            raise MethodError(
                f"start={self.start:g} is below threshold={self.threshold:g}: all gates would be closed, and D "
                "has no gradient behind a closed gate; start above it"
            )

    def at_rate(self, rate: float) -> "Taps":
        """Gates at the distance from the threshold, in steps of this size."""
        return self if self.distance is None else replace(self, start=self.threshold + self.distance * rate)

    def transform(self, site: Site) -> "GatedWeights":
        return GatedWeights(self, site)

    def objective(self, base: "Base", domain: "Domain", images: Images) -> "Sparsity | None":
        found = [t.score for _, t in domain.named_transforms() if isinstance(t, GatedWeights) and t.score is not None]
        return Sparsity(self.sparsity, found) if self.sparsity and found else None


class GatedWeights(FreeWeights):
    """One site's D and d, and while it learns s (1,); stored, D and d, or nothing."""

    score: nn.Parameter | None

    def __init__(self, method: Taps, site: Site) -> None:
        super().__init__(site)
        self.threshold = method.threshold
        self.score = nn.Parameter(torch.full((1,), method.start, dtype=site.learned_dtype))

    @property
    def is_open(self) -> bool:
        """Whether the layer is the domain's own; taken to be so where nothing is known yet."""
        if self.score is None:
            return "delta" in self._parameters
        return self.score.is_meta or bool(self.score >= self.threshold)

    @property
    def keeps_weight(self) -> bool:
        return self.score is None and not self.is_open

    def gate(self) -> Tensor | float:
        """1[s >= t] with the gradient of s."""
        if self.score is None:
            return float(self.is_open)
        return (self.score >= self.threshold).to(self.score.dtype) + (self.score - self.score.detach())

    def weight(self, base_weight: Tensor) -> Tensor:
        if self.keeps_weight:
            return base_weight
        return (base_weight + self.gate() * self.delta).to(base_weight.dtype)

    def bias(self, base_bias: Tensor | None) -> Tensor | None:
        if base_bias is None or self.delta_bias is None:
            return None
        return (base_bias + self.gate() * self.delta_bias).to(base_bias.dtype)

    def weight_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p is not self.score]

    def scalar_parameters(self) -> list[nn.Parameter]:
        return [] if self.score is None else [self.score]

    def stored(self) -> dict[str, Stored]:
        return {n: t for n, t in super().stored().items() if n != "score"} if self.is_open else {}

    def restore(self, stored: Mapping[str, Stored]) -> None:
        self.score = None
        if stored:
            super().restore(stored)
            return
        self._parameters.pop("delta", None)
        self.delta_bias = None


class Sparsity(Objective):
    """λ times the mean |s| over all sites."""

    def __init__(self, sparsity: float, scores: Sequence[Tensor]) -> None:
        super().__init__()
        self.sparsity = sparsity
        self.scores = list(scores)  # the domain's: a list keeps them out of `parameters`

    def forward(self, images: Tensor, features: Tensor) -> Tensor:
        return self.sparsity * torch.cat([score.abs() for score in self.scores]).mean()


PRESETS: dict[str, Method] = {"taps": Taps()}
