"""Budget-aware adapters (BA²): a domain switches input channels of the base's layers off.

    W~[:, c] = s_c W[:, c],        s = 1[r >= 0],        mean(s) <= β

r is one score and s one switch per input channel of a site; W is frozen. The mean is over the switches of all sites, so
a layer may keep more than its share where another keeps less (a stem tends to keep its colours). While training, a
Lagrange term asks for the budget (`Budget`). The stored form always keeps to it: a site keeps at most `limit` channels,
its best, and the limits of all sites add up to at most β of all channels. Every site keeps its best channel, so no
layer is dead, even if that exceeds a very small budget.

While it learns (in training mode, with gradients) the switches follow the scores, and the limits are not applied:
channels go one by one as the term gets stronger, and the network adapts. Everywhere else the switches are the stored
ones. A training loop of your own that leaves the term out gets a budget layer by layer, and a network that was not
trained for it.

An input channel of a grouped convolution is one of the tensor that enters it: channel c is column
c mod (C_in / groups) of the filters of group c div (C_in / groups). One of a depthwise
convolution is one filter, and its output goes with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from polymask.core.method import Images, Method
from polymask.core.network import without_channels
from polymask.core.parts import MaskTransform, Objective, Stored
from polymask.core.survey import Site
from polymask.errors import MethodError

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain


@dataclass(frozen=True, kw_only=True)
class Ba2(Method):
    """Switches on input channels, at most `budget` (β) of which are on.

    Scores start around `start`, in each site in proportion to the norm of a channel's weights,
    so every channel is on. `ascent` is the rate at which the budget's multiplier rises.
    """

    budget: float = 1.0
    start: float = 1e-2
    ascent: float = 1e-4

    title: ClassVar[str] = "budget-aware adapters"
    reference: ClassVar[str] = "arXiv 1905.06242"
    differences: ClassVar[str] = (
        "There is no public code. The original's budget is a mean in the loss; here it is a sum "
        "with a multiplier that rises until the budget holds, and the stored form keeps to it "
        "in any case. Every layer keeps at least one channel."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("budget", 0, 1)
        self.check_range("start", 0, 1)
        self.check_range("ascent", 0, 1)
        if self.budget == 0:
            raise MethodError("budget=0 must be more than 0: some channels have to stay")

    def transform(self, site: Site) -> "Switches | None":
        """One switch an input channel; None where there is only one channel to read."""
        groups, _, columns = _switch_shape(site)
        return Switches(self, site) if groups * columns > 1 else None

    def objective(self, base: "Base", domain: "Domain", images: Images) -> "Budget | None":
        """The Lagrange term; None where every channel may stay on."""
        sites = [t for _, t in domain.named_transforms() if isinstance(t, Switches)]
        return Budget(self, sites) if sites and self.budget < 1 else None


class Switches(MaskTransform):
    """One site's scores (C_in,) or, stored, its packed switches."""

    limit: Tensor | None  # of channels that the stored form may keep

    def __init__(self, method: Ba2, site: Site) -> None:
        super().__init__()
        self.switch_shape = _switch_shape(site)
        self.channels = self.switch_shape[0] * self.switch_shape[2]
        self.shape, self.dtype = (self.channels,), site.learned_dtype
        self.scores = nn.Parameter(torch.full((self.channels,), method.start, dtype=self.dtype))
        # The site's own share, until the objective has compared sites.
        self.register_buffer("limit", torch.tensor(max(1, int(method.budget * self.channels))))
        self.register_buffer("words", None)

    @torch.no_grad()
    def begin(self, base_weight: Tensor) -> None:
        """Order the scores by the norms of the channels' weights."""
        assert self.scores is not None
        W = base_weight.reshape(*self.switch_shape, -1).to(self.dtype)
        norms = W.square().sum((1, 3)).sqrt().view(-1)
        self.scores.mul_(norms / norms.mean().clamp(min=torch.finfo(self.dtype).tiny))

    def weight(self, base_weight: Tensor) -> Tensor:
        """s_c W[:, c]; while learning without the limit."""
        groups, _, columns = self.switch_shape
        W = base_weight.reshape(*self.switch_shape, -1).to(self.dtype)
        learns = self.training and torch.is_grad_enabled()
        s = self.mask().to(self.dtype) if self.scores is None else self.switches(None if learns else self.limit)
        return (W * s.view(groups, 1, columns, 1)).to(base_weight.dtype).view(base_weight.shape)

    def switches(self, limit: Tensor | int | None = None) -> Tensor:
        """The switches by the scores, at most `limit` on: zeros and ones with the scores' gradient."""
        made: Tensor = _Switch.apply(self.scores, self.channels if limit is None else limit)  # type: ignore[no-untyped-call]
        return made

    def mask_of(self, scores: Tensor) -> Tensor:
        """The switches that are stored, (C_in,) boolean."""
        assert self.limit is not None
        return _best(scores, self.limit)

    def flipped(self) -> int | None:
        """The channels that are off: all started on."""
        return self.channels - int(self.mask().sum())

    def restore(self, stored: Mapping[str, Stored]) -> None:
        super().restore(stored)
        self.limit = None

    def compact(self, layer: nn.Module) -> nn.Module | None:
        return without_channels(layer, self.mask())


class Budget(Objective):
    """λ max(0, Σ s - β C), where λ rises as long as too many of all C switches are on.

        λ <- max(0, λ + ascent (mean(s) - β))        with every batch

    λ is what every score's gradient gets, and is compared with what the loss says of a channel: 1e-3 to 1e-2, for
    networks of any size. So it is a sum where the paper has a mean. The objective also tells every site how many
    channels its stored form may keep: as many as it has among the best scores of all sites.
    """

    multiplier: Tensor

    def __init__(self, method: Ba2, sites: Sequence[Switches]) -> None:
        super().__init__()
        self.budget, self.ascent = method.budget, method.ascent
        self.sites = tuple(sites)  # the domain's: they must not become submodules here
        self.register_buffer("multiplier", self._scores()[0].new_zeros(()))

    def forward(self, images: Tensor, features: Tensor) -> Tensor:
        """The term, a number; λ and the limits are brought up to date first."""
        self._set_limits()
        switches = torch.cat([site.switches() for site in self.sites])
        excess = switches.mean() - self.budget
        self.multiplier = (self.multiplier + self.ascent * excess.detach()).clamp(min=0)
        return self.multiplier * len(switches) * excess.clamp(min=0)

    def _set_limits(self) -> None:
        for site, limit in zip(self.sites, limits(self._scores(), self.budget), strict=True):
            assert site.limit is not None
            site.limit.copy_(limit)

    def _scores(self) -> list[Tensor]:
        return [site.scores.detach() for site in self.sites if site.scores is not None]


def limits(scores: Sequence[Tensor], budget: float) -> Tensor:
    """How many of each site's scores are among the best of all, (sites,); at least one of each.

    They add up to the budget's share of all scores, rounded down, or to the number of sites.
    """
    sizes = torch.tensor([len(own) for own in scores])
    everything = torch.cat(list(scores))
    first = torch.cat([_best(own, 0) for own in scores])
    order = everything.masked_fill(first, float("inf")).argsort(descending=True, stable=True)
    chosen = order[: max(len(scores), int(budget * len(everything)))]
    site = torch.arange(len(scores)).repeat_interleave(sizes).to(chosen.device)
    return site[chosen].bincount(minlength=len(scores))


def _best(scores: Tensor, limit: Tensor | int) -> Tensor:
    """Those r >= 0 among the `limit` best, earlier ones first of equals; the best in any case."""
    rank = scores.argsort(descending=True, stable=True).argsort()
    return (rank == 0) | ((rank < limit) & (scores >= 0))


class _Switch(torch.autograd.Function):
    """`_best` as zeros and ones, with the gradient of the identity."""

    @staticmethod
    def forward(scores: Tensor, limit: Tensor | int) -> Tensor:
        return _best(scores, limit).to(scores.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _switch_shape(site: Site) -> tuple[int, int, int]:
    """A shape (groups, rows, C_in / groups) of the weight, before what is left of it."""
    if site.transposed:
        return site.shape[0], 1, 1  # a row for every input channel
    return site.groups, site.shape[0] // site.groups, site.shape[1]


# While channels are switched off one by one, statistics of norms lag behind: they are taken again.
PRESETS: dict[str, Method] = {
    "ba2": Ba2(),
    "ba2-75": Ba2(budget=0.75, norm_reestimate=True),
    "ba2-50": Ba2(budget=0.5, norm_reestimate=True),
    "ba2-25": Ba2(budget=0.25, norm_reestimate=True),
}
