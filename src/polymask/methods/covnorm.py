"""CovNorm: series adapters cut down to the directions in which their signals vary.

    A ≈ C M W,        W = Λ_x^-½ E_x',        C = E_y Λ_y^½,        M = Λ_y^-½ E_y' A E_x Λ_x^½

First a domain learns full series adapters, z = y + A x with x = BN(y). Over the training images x has the mean m and
the principal components E_x with variances Λ_x, and A x those of A cov(x) A', E_y with Λ_y; of each the leading ones
are kept (k_x and k_y), up to a share of the variance. W (k_x, C_out) whitens x and C (C_out, k_y) colours the result.
The mini-adapter M (k_y, k_x) is the one of least squares: with all components C M W is A. BN is fixed from here on, so

    z = y + C M (W BN(y) - W m) + A m

is affine in y and folds into the layer. C and W stay; M, the norms and the head learn on. M is
stored as part of its smaller neighbour: two factors of rank r = min(k_x, k_y), and an offset.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn

from polymask.core.method import Images, Method, Stage
from polymask.core.parts import Stored, Transform
from polymask.core.survey import Site
from polymask.errors import MethodError
from polymask.methods.series_adapter import Adapter, SeriesAdapter, mixed, plus_mixed

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain

_NOTHING = 1e-12  # of the largest variance: what is below it is rounding


@dataclass(frozen=True, kw_only=True)
class CovNorm(SeriesAdapter):
    """Series adapters first; then M between fixed C and W.

    `energy` is the share of the variance that the kept components must have. `ranks` holds
    [k_x, k_y] by site, found when the adapters have learned; a site without an entry has a full
    adapter. Grouped convolutions have components of their own in each group, the same number.
    """

    energy: float = 0.995
    ranks: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)

    title: ClassVar[str] = "CovNorm"
    reference: ClassVar[str] = "arXiv 1906.10267"
    differences: ClassVar[str] = (
        "As in the authors' released code for VGG-16, the adapters are residual, behind a batch norm of their own, "
        "keep 0.995 of the variance (the project page speaks of 0.9), and learn in a second stage of the same length "
        "and rate as the first. That code takes E_x' and E_y without scaling, draws M from N(0, 0.01²) where here it "
        "starts at least squares, lets the norm before the adapter follow the batch, and after five epochs lets all of "
        "the adapter learn; it also adapts the fully connected layers (`sites='all'`), and starts the adapters from "
        "ones that were pretrained on ImageNet. The joint variant, which shares C and W over domains, is not here."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("energy", 0.0, 1.0)
        if not isinstance(self.ranks, Mapping):
            raise MethodError(f"ranks={self.ranks!r} must be [k_x, k_y] by site")
        object.__setattr__(self, "ranks", {n: _checked(n, pair) for n, pair in self.ranks.items()})

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The adapters, then the mini-adapters at the full rate, as in the authors' code."""
        return (Stage(1 / 2), Stage(1 / 2))

    def transform(self, site: Site) -> Transform | None:
        if site.name in self.ranks and self.adapts(site):
            return MiniAdapter(site, *self.ranks[site.name])
        return super().transform(site)

    def next_stage(self, base: "Base", domain: "Domain", images: Images) -> "Domain | None":
        """Mini-adapters in place of the adapters that have learned."""
        adapters = {n: t for n, t in domain.named_transforms() if isinstance(t, Adapter)}
        if not adapters:
            return None
        moments = adapter_moments(base, domain, adapters, images)
        factors = {n: Factors(adapters[n], *moments[n].taken(), self.energy) for n in adapters}
        ranks = dict(self.ranks) | {name: f.ranks for name, f in factors.items()}
        following = domain.rebuilt(base, replace(self, ranks=ranks))
        for name, transform in following.named_transforms():
            cast(MiniAdapter, transform).take(factors[name])
        return following


class Moments:
    """Sums over pixels of x (groups, rows, pixels) and x x', in double precision."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.count = 0
        self.total = torch.zeros(adapter.groups, adapter.rows, 1, dtype=torch.float64)
        self.products = self.total @ self.total.mT

    def follow(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """A forward hook: note BN(y), and go on with what the adapter makes of y."""
        x = self.adapter.normed(output)
        channels_first = x.movedim(-1 if self.adapter.kind == "linear" else 1, 0).to(self.adapter.adapter.dtype)
        rows = channels_first.reshape(self.adapter.groups, self.adapter.rows, -1)
        self.count += rows.shape[-1]
        self.total += rows.sum(-1, keepdim=True).cpu()
        self.products += (rows @ rows.mT).cpu()
        return self.adapter.output(inputs[0], output)

    def taken(self) -> tuple[Tensor, Tensor]:
        """The mean (groups, rows, 1) and the covariance (groups, rows, rows)."""
        mean = self.total / self.count
        return mean, self.products / self.count - mean @ mean.mT


@torch.no_grad()
def adapter_moments(
    base: "Base", domain: "Domain", adapters: Mapping[str, Adapter], images: Images
) -> dict[str, Moments]:
    """What goes into each adapter, over the images, with all statistics fixed."""
    moments = {name: Moments(adapter) for name, adapter in adapters.items()}
    # The layers run as the base has them, so that their outputs are y, and the hooks make z.
    folded = {n for name in adapters for n in (name, domain.sites[name].bias)}
    weights = {n: t for n, t in domain.weights(base).items() if n not in folded}
    hooks = {name.rpartition(".")[0]: its.follow for name, its in moments.items()}
    with base.hooked(hooks):
        for batch, _ in images():
            base.run(weights, batch)
    return moments


class Factors:
    """C, M and W of one adapter, and the two offsets, in double precision."""

    def __init__(self, adapter: Adapter, mean: Tensor, covariance: Tensor, energy: float) -> None:
        A = adapter.adapter.detach().cpu().double()
        slope, offset = (t.detach().cpu().double() for t in adapter.affine())
        directions_x, sizes_x = principal(covariance, energy)
        directions_y, sizes_y = principal(A @ covariance @ A.mT, energy)
        whitening = (directions_x / sizes_x).mT
        self.ranks = (sizes_x.shape[-1], sizes_y.shape[-1])
        # W BN(y) - W m = (W S) y - W (m - o)
        self.whitening, self.centre = whitening * slope.mT, whitening @ (mean - offset)
        self.colouring, self.shift = directions_y * sizes_y, A @ mean
        self.mini = (directions_y / sizes_y).mT @ A @ (directions_x * sizes_x)


def principal(covariance: Tensor, energy: float) -> tuple[Tensor, Tensor]:
    """The leading components of each group (groups, rows, k), and their deviations (groups, 1, k).

    k is the smallest number that leaves no group with less than its share of the variance.
    """
    variances, directions = torch.linalg.eigh(covariance)
    variances, directions = variances.flip(-1).clamp(min=0), directions.flip(-1)
    largest, total = variances[:, :1], variances.sum(-1, keepdim=True)
    wanted = (variances.cumsum(-1) < energy * total).sum(-1) + 1
    present = (variances > _NOTHING * largest).sum(-1)
    k = max(1, int(torch.minimum(wanted, present).max()))
    # A direction without variance needs some size: it is divided by, and multiplied again.
    least = torch.where(largest > 0, _NOTHING * largest, 1.0)
    deviations = variances[:, :k].maximum(least).sqrt()
    return directions[..., :k], deviations[:, None, :]


class MiniAdapter(Transform):
    """One site's M between C and W; stored, two factors of rank r and an offset.

    Learning: mini (groups, k_y, k_x), colouring (groups, rows, k_y), whitening (groups, k_x, rows), centre (groups,
    k_x, 1), shift (groups, rows, 1). Stored: up (groups, rows, r), down (groups, r, rows), offset (groups, rows, 1).
    """

    components: ClassVar[Mapping[str, str]] = dict.fromkeys(("up", "down", "offset"), "weights")

    mini: nn.Parameter | None
    colouring: Tensor
    whitening: Tensor
    centre: Tensor
    shift: Tensor
    up: Tensor
    down: Tensor
    offset: Tensor

    def __init__(self, site: Site, k_x: int, k_y: int) -> None:
        super().__init__()
        groups, rows = site.groups, site.channels // site.groups
        if max(k_x, k_y) > rows:
            raise MethodError(f"ranks of {site.name} are [{k_x}, {k_y}], but it has {rows} channels to mix")
        self.dtype = site.dtype
        tensor = partial(torch.zeros, dtype=site.learned_dtype)
        self.mini = nn.Parameter(tensor(groups, k_y, k_x))
        # A domain that has learned no adapters mixes its first channels.
        for name, shape in (("colouring", (rows, k_y)), ("whitening", (k_x, rows))):
            eye = tensor(groups, *shape)
            eye.diagonal(dim1=1, dim2=2).fill_(1.0)
            self.register_buffer(name, eye)
        self.register_buffer("centre", tensor(groups, k_x, 1))
        self.register_buffer("shift", tensor(groups, rows, 1))
        for name in self.components:
            self.register_buffer(name, None)

    @torch.no_grad()
    def take(self, factors: Factors) -> None:
        """Start from an adapter's factors."""
        for name in ("mini", "colouring", "whitening", "centre", "shift"):
            getattr(self, name).copy_(getattr(factors, name))

    def factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """`up`, `down` and `offset` of z = y + up down y + offset."""
        if self.mini is None:
            return self.up, self.down, self.offset
        up, down, centre = self.colouring, self.whitening, self.centre
        if up.shape[-1] < down.shape[-2]:
            down, centre = mixed(self.mini, down), mixed(self.mini, centre)
        else:
            up = mixed(up, self.mini)
        return up, down, self.shift - mixed(up, centre)

    def weight(self, base_weight: Tensor) -> Tensor:
        up, down, _ = self.factors()
        return plus_mixed(base_weight, up, down)

    def bias(self, base_bias: Tensor | None) -> Tensor | None:
        """(I + up down) b + offset, of the site's type."""
        up, down, offset = self.factors()
        added = offset.view(-1).to(self.dtype)
        return added if base_bias is None else plus_mixed(base_bias, up, down) + added

    def stored(self) -> dict[str, Stored]:
        return {n: t.detach() for n, t in zip(self.components, self.factors(), strict=True)}

    def restore(self, stored: Mapping[str, Stored]) -> None:
        for name in ("colouring", "whitening", "centre", "shift"):
            self.register_buffer(name, None)
        self.mini = None
        super().restore(stored)


def _checked(name: str, pair: tuple[int, int]) -> tuple[int, int]:
    is_pair = isinstance(pair, list | tuple) and len(pair) == 2
    if not is_pair or not all(type(k) is int and k > 0 for k in pair):
        raise MethodError(f"ranks of {name} are {pair!r}; they must be [k_x, k_y], from 1 on")
    return pair[0], pair[1]


PRESETS: dict[str, Method] = {"covnorm": CovNorm()}
