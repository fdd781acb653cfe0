"""Parallel adapters: a 1x1 convolution beside each larger one, folded into its kernel.

    W~ = W + A at the centre tap,        so        y = W * x + A * x

A is a 1x1 map of C_in / groups to C_out channels at the convolution's own stride. The two forms of
y agree where the padding is the usual one, half of the (dilated) kernel on each side; with another
padding, A reads the pixel under the kernel's centre. Beside a grouped convolution A has its groups,
so it is block-diagonal: beside a depthwise one, a number per channel.

PA-SVD: parallel adapters whose columns lie in one space for all domains.

    A_t ~ U V_t,        [A_1 … A_T] = U S V'  cut at rank r

Every domain first learns full parallel adapters A_t (C_out, C_in / groups). Then those of a layer
are set side by side over the domains; their r leading left singular vectors are U (C_out, r), kept
once for all domains, and V_t = U' A_t (r, C_in / groups) is what a domain keeps. U stays; the V_t
learn on. So it takes all domains (`fit_all`); a domain that is made alone has a U drawn at random.

Where r > C_in / groups, U alone has more numbers than A_t: beside a depthwise convolution, whose
A_t is a number per channel, far more. Such a site keeps its A_t, which learns on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymask.core.method import Method, Stage
from polymask.core.parts import Transform
from polymask.core.survey import Site

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain


Start = Literal["he", "zero", "identity"]
_LITTLE = 1e-4  # of the identity


@dataclass(frozen=True, kw_only=True)
class ParallelAdapter(Method):
    """W~ = W + A at the centre tap.

    `sites`: "spatial" adapts the kernels that are larger than 1x1 and odd in every dimension, as the original does,
    whose network has 3x3 convolutions only. "all" also adapts 1x1 convolutions and linear layers, where A is as large
    as W. A kernel with an even side has no centre tap and is left alone by both.
    `start`: "zero" starts at the base. "he" draws A from N(0, 2 / C_out), as the original does: a
    random A perturbs every layer, and training begins by making up for that.
    "identity" is 1e-4 I, the start of `tsa`.
    """

    sites: Literal["spatial", "all"] = "spatial"
    start: Start = "zero"

    title: ClassVar[str] = "parallel adapters"
    reference: ClassVar[str] = "arXiv 1803.10082"
    differences: ClassVar[str] = (
        "The original starts by He's rule (`start='he'`), here A starts at zero, so that a new domain is "
        "the base. The released code also has dropout on what an adapter reads, which no change of the weights can "
        "express, and a flag that adapts only the first or second convolution of a block; patterns over sites "
        "(`include`, `exclude`) do that here. The two forms agree where the padding is half the kernel."
    )
    wider: ClassVar[Mapping[str, Any]] = {"sites": "all"}

    def transform(self, site: Site) -> Transform | None:
        """An adapter; None where the kernel has no centre, or is not to be adapted."""
        has_centre = all(side % 2 for side in site.shape[2:])
        return CentreTap(self, site) if has_centre and (site.spatial or self.sites == "all") else None


class CentreTap(Transform):
    """One site's adapter, of W's first two dimensions.

    These are (C_out, C_in / groups); of a transposed convolution (C_in, C_out / groups), where A
    is a transposed 1x1 convolution and, at a stride, reaches only the pixels under a centre.
    """

    components: ClassVar[Mapping[str, str]] = {"adapter": "weights"}

    def __init__(self, method: ParallelAdapter, site: Site) -> None:
        super().__init__()
        kernel = site.shape[2:]
        self.tap_shape = site.shape[:2] + (1,) * len(kernel)
        # F.pad counts from the last dimension, and wants both ends of each.
        self.padding = [side // 2 for side in reversed(kernel) for _ in range(2)]
        adapter = torch.zeros(site.shape[:2], dtype=site.learned_dtype)
        if method.start == "he":
            adapter.normal_(0.0, math.sqrt(2.0 / site.channels))
        elif method.start == "identity":
            rows, columns = adapter.shape
            adapter += _LITTLE * torch.eye(rows // site.groups, columns).repeat(site.groups, 1)
        self.adapter = nn.Parameter(adapter)

    def weight(self, base_weight: Tensor) -> Tensor:
        return add_at_centre(base_weight, self.adapter, self.tap_shape, self.padding)


def add_at_centre(base_weight: Tensor, adapter: Tensor, tap_shape: tuple[int, ...], padding: list[int]) -> Tensor:
    """W with a 1x1 map added at the centre of its kernel."""
    at_centre = F.pad(adapter.view(tap_shape), padding)
    return (base_weight + at_centre).to(base_weight.dtype)


@dataclass(frozen=True, kw_only=True)
class PaSvd(ParallelAdapter):
    """W~ = W + U V_t at the centre tap; r is the share `keep` of C_out.

    `everywhere` puts factors also where they have more numbers than the adapter that they replace.
    `factored` is False for domains that have not learned their full adapters yet. These start at zero: what is left of
    a random start after short training is noise of full rank, and half of the rank would cut it off.
    """

    keep: float = 0.5
    everywhere: bool = False
    factored: bool = True

    title: ClassVar[str] = "parallel adapters in factors"
    reference: ClassVar[str] = "arXiv 1803.10082"
    differences: ClassVar[str] = (
        "There is no public code, and the rank is not published: half of the output channels is our choice, and so is "
        "the recipe of the last stage. U is found by one SVD a layer over all domains, as the paper describes it. Its "
        "network has 3x3 convolutions of many channels alone; here an adapter stays whole where U would be larger than "
        "it is (r > C_in / groups): depthwise convolutions, and the first layer."
    )
    unnamed: ClassVar[Mapping[str, Any]] = {"everywhere": True}

    settles: ClassVar[bool] = True
    refines: ClassVar[Stage | None] = Stage(1 / 3, 0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("keep", 0.0, 1.0)

    def transform(self, site: Site) -> Transform | None:
        """U and V_t, or a full adapter before there is a U."""
        full = super().transform(site)
        if not isinstance(full, CentreTap) or not self.factored:
            return full
        rows, columns = full.adapter.shape
        if self.rank(rows) > columns and not self.everywhere:
            return full
        return FactoredTap(full, self.rank(rows))

    def rank(self, rows: int) -> int:
        """The r of an adapter with so many rows."""
        return max(1, round(self.keep * rows))

    def after(self, earlier: Sequence["Domain"]) -> Method:
        """Full adapters first."""
        return replace(self, factored=False)

    def settle(self, base: "Base", domains: Sequence["Domain"]) -> "Sequence[Domain]":
        """All domains in factors, which can learn on."""
        settled = [d.rebuilt(base, replace(self, factored=True)) for d in domains]
        before = [dict(domain.named_transforms()) for domain in domains]
        after = [dict(domain.named_transforms()) for domain in settled]
        for site in before[0]:
            adapters = [_adapter(transforms[site]) for transforms in before]
            taps = [transforms[site] for transforms in after]
            if isinstance(taps[0], FactoredTap):
                vectors = torch.linalg.svd(torch.cat(adapters, 1), full_matrices=True)[0]
            for tap, adapter in zip(taps, adapters, strict=True):
                if isinstance(tap, FactoredTap):
                    tap.take(vectors[:, : tap.shared.shape[1]], adapter)
                else:
                    _adapter(tap).copy_(adapter)
        return settled


class FactoredTap(Transform):
    """One site's U, fixed, and V_t, learned."""

    components: ClassVar[Mapping[str, str]] = {"shared": "shared", "own": "weights"}

    shared: Tensor

    def __init__(self, full: CentreTap, rank: int) -> None:
        super().__init__()
        rows, columns = full.adapter.shape
        self.tap_shape, self.padding = full.tap_shape, full.padding
        dtype = full.adapter.dtype
        self.register_buffer("shared", nn.init.orthogonal_(torch.zeros(rows, rank, dtype=dtype)))
        self.own = nn.Parameter(torch.zeros(rank, columns, dtype=dtype))

    def take(self, shared: Tensor, adapter: Tensor) -> None:
        """Put a U here, and the V that comes nearest to `adapter` with it."""
        self.shared = shared.clone()
        self.own.data = shared.T @ adapter

    def weight(self, base_weight: Tensor) -> Tensor:
        return add_at_centre(base_weight, self.shared @ self.own, self.tap_shape, self.padding)


def _adapter(transform: Transform) -> Tensor:
    assert isinstance(transform, CentreTap)
    return transform.adapter.detach()


PRESETS: dict[str, Method] = {"parallel-adapter": ParallelAdapter(), "pa-svd": PaSvd()}
