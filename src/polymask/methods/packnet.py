"""PackNet: one weight for all domains, of which each learns what those before it left free.

    W~ = V∘1[0 < O <= t + 1]

V is the weight that the domains share and O its owners: 0 is free, 1 the base's own, t + 1 the domain's at place t = 1,
2, …. Of the base the smallest weights are pruned: of n weights of a layer those go with |w| <= the k-th smallest |w|, k
= round(p n). A domain takes all that is free, starting at 0, and learns it beside the frozen weights of those before
it. Then its own smallest weights are pruned, layer by layer, and what it keeps is trained once more. What it let go is
free for the next domain. No weight with an owner ever changes again, so no domain forgets; the base loses what its
pruning costs.

How much of the base goes depends on whether it can learn to do without. With images of its own (`fit_all(..., own=)`) p
is 0.5, as in the original, and what is left is retrained. Without them nothing makes up for the loss, and p is 0.25.
Depthwise kernels, whose filters read one channel each, keep all their weights and stay the base's: they are a few per
cent of a separable network's weights, and nothing else in the layer can stand in for one that is gone.

The last domain that O has room for is not pruned: nothing is left for anyone after it. So it may
be written as 0 where nothing else can be 0, and ceil(log2 T) bits hold the owners of T domains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from polymask.core.bits import Bits
from polymask.core.method import Images, Method, Stage
from polymask.core.network import structural_copy
from polymask.core.parts import NormPolicy, Stored, Transform
from polymask.core.survey import Site
from polymask.errors import MethodError

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain

FREE, BASE = 0, 1  # owners; a domain's is its place + 1
_LARGEST = 128  # domains: their owners are bytes
_RETRAINED, _LEFT_AS_IT_IS = 0.5, 0.25  # shares of the base that go


@dataclass(frozen=True, kw_only=True)
class PackNet(Method):
    """W~ = V∘1[0 < O <= t + 1].

    `capacity` is the number of domains, the base's own included, that O has room for; None is as many as there are: T
    in `fit_all`, and t + 1 for a domain that is made alone, which then is the last and is not pruned. `place` is t: 0
    is the base's own domain, which trains what its pruning left. `prune_base` and `prune` are the shares of weights
    that the base and a domain let go; prune_base=None is 0.5 where the base is retrained on its own images, else 0.25.
    `prune_depthwise` prunes depthwise kernels like all others. `pruned` says that a domain has been pruned, and only
    learns on; training sets it and `place`.
    """

    norms: NormPolicy = "shared"
    capacity: int | None = None
    place: int = 1
    prune_base: float | None = None
    prune: float = 0.75
    prune_depthwise: bool = False
    pruned: bool = False

    title: ClassVar[str] = "PackNet"
    reference: ClassVar[str] = "arXiv 1711.05769"
    differences: ClassVar[str] = (
        "On the base's own images only weights and the head are retrained, not biases and norms. Without such images "
        "the pruned base is left as it is, and a quarter of it goes instead of half. Depthwise kernels are not pruned: "
        "the original's networks have none, and they are a few per cent of a separable network's weights; that this is "
        "the better rule is our choice and not measured. The last domain is not pruned, as in the original; the "
        "ratios of its sequences of five domains are not published, 0.75 is used for all. The best epoch is chosen on "
        "val, in the original on test. Optional biases of each domain are not here."
    )
    moves_base: ClassVar[bool] = True
    ordered: ClassVar[bool] = True
    base_stage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity is not None:
            self.check_whole("capacity", 2, _LARGEST)
        self.check_whole("place", 0, (self.capacity or _LARGEST) - 1)
        if self.prune_base is not None:
            self.check_range("prune_base", 0, 1)
        self.check_range("prune", 0, 1)

    @property
    def rooms(self) -> int:
        """How many domains O has room for: by default as many as there are."""
        return max(2, self.place + 1) if self.capacity is None else self.capacity

    def base_share(self, site: Site) -> float:
        """The share of the base's weights that go at a site; place 0 is the domain that trains what is left."""
        if site.depthwise and not self.prune_depthwise:
            return 0.0
        if self.prune_base is not None:
            return self.prune_base
        return _RETRAINED if self.place == 0 else _LEFT_AS_IT_IS

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Learning, then what is left after pruning, as in the original: 20 and 10 epochs."""
        pruned = 0 < self.place < self.rooms - 1
        return (Stage(2 / 3), Stage(1 / 3, 0.1)) if pruned else (Stage(1.0),)

    def transform(self, site: Site) -> "PackedWeight":
        return PackedWeight(self, site)

    def next_stage(self, base: "Base", domain: "Domain", images: Images) -> "Domain | None":
        """Prune what the domain has learned, and let it learn on; the last one keeps it all."""
        if self.pruned or self.place in (0, self.rooms - 1):
            return None
        following = domain.rebuilt(base, replace(self, pruned=True))
        for mine, its in _pairs(following, domain):
            gone = smallest(its.values, its.owner == its.own, self.prune)
            mine.hold(its.values.masked_fill(gone, 0), its.owner.masked_fill(gone, FREE))
        return following

    def for_base(self) -> "PackNet":
        """The base's own domain: it trains what is left of the base."""
        return replace(self, place=0, pruned=False)

    def for_domains(self, domains: int) -> "PackNet":
        """Room for all of them, and for more only where it was asked for."""
        return replace(self, capacity=max(self.capacity or 2, domains))

    def after(self, earlier: Sequence["Domain"]) -> "PackNet":
        places = [_method(domain).place for domain in earlier]
        place = max(places) + 1 if places else max(self.place, 1)
        if self.capacity is not None and place >= self.capacity:
            raise MethodError(
                f"all places are taken: capacity={self.capacity} is the base's own domain and "
                f"{self.capacity - 1} more; make all of them again with capacity={place + 1}"
            )
        return replace(self, place=place, pruned=False)

    def follow(self, domain: "Domain", earlier: Sequence["Domain"]) -> None:
        """Take over the weight and its owners from the domain before."""
        if not earlier:
            return
        before = max(earlier, key=lambda domain: _method(domain).place)
        method, place = _method(before), _method(domain).place
        if method.place >= place:
            raise MethodError(f"place={place} is taken; make the domain by method.after(earlier)")
        pairs = _pairs(domain, before)
        if not any((its.owner == FREE).any() for _, its in pairs):
            raise MethodError(
                f"no weight is free any more after the domain at place {method.place}, of capacity={method.rooms} with "
                f"prune={method.prune:g}; make the domains again with more of either, or all of them by fit_all"
            )
        for mine, its in pairs:
            mine.hold(its.values, mine.claimed(its.owner))

    def settle(self, base: "Base", domains: Sequence["Domain"]) -> "Sequence[Domain]":
        """Copies that share one weight and one map of owners, the last domain's."""
        if not domains:
            return domains
        last = max(domains, key=lambda domain: _method(domain).place)
        settled = [domain if domain is last else structural_copy(domain) for domain in domains]
        for domain in settled:
            for mine, its in _pairs(domain, last):
                mine.values, mine.owner = its.values, its.owner
        return settled

    def moved(self, base: "Base", domains: Sequence["Domain"]) -> dict[str, Tensor]:
        """V∘1[O = 1]: what the base keeps of its own, as trained where it was."""
        if not domains:
            return {}
        packed = _packed(domains[-1]).items()
        return {name: torch.where(t.owner == BASE, t.values, 0.0).to(base.tensor(name).dtype) for name, t in packed}


class PackedWeight(Transform):
    """One site's V and O, both of its shape, and what is learned in V's place where O is own."""

    components: ClassVar[Mapping[str, str]] = {"weight": "moved", "owner": "index"}
    learns_weights: ClassVar[bool] = True

    values: Tensor
    owner: Tensor
    learned: nn.Parameter | None

    def __init__(self, method: PackNet, site: Site) -> None:
        super().__init__()
        dtype = site.learned_dtype
        self.own, self.base_share = method.place + 1, method.base_share(site)
        self.is_last = self.own == method.rooms
        self.planes = (method.rooms - 1).bit_length()  # ceil(log2 rooms)
        self.register_buffer("values", torch.zeros(site.shape, dtype=dtype))
        self.register_buffer("owner", torch.zeros(site.shape, dtype=torch.uint8))
        self.learned = nn.Parameter(torch.zeros(site.shape, dtype=dtype))

    def begin(self, base_weight: Tensor) -> None:
        """Prune the base; what is free is this domain's, as if it were the first."""
        everywhere = torch.ones_like(base_weight, dtype=torch.bool)
        gone = smallest(base_weight, everywhere, self.base_share)
        owner = torch.where(gone, FREE, BASE).to(torch.uint8)
        self.hold(base_weight.masked_fill(gone, 0), self.claimed(owner))

    def claimed(self, owner: Tensor) -> Tensor:
        """The owners once this domain took all that is free; the base takes nothing."""
        return owner if self.own == BASE else owner.masked_fill(owner == FREE, self.own)

    @torch.no_grad()
    def hold(self, values: Tensor, owner: Tensor) -> None:
        """Copies of V and O, and what is the domain's own in them to learn on."""
        assert self.learned is not None
        self.values = values.to(self.learned, copy=True)
        self.owner = owner.to(self.learned.device, copy=True)
        self.learned.copy_(torch.where(self.owner == self.own, self.values, 0.0))

    def weight(self, base_weight: Tensor) -> Tensor:
        """V∘1[0 < O <= own]; gradients reach own weights alone."""
        return torch.where(self.mask(), self._current(), 0.0).to(base_weight.dtype)

    def mask(self) -> Tensor:
        """1[0 < O <= own]: the weights that this domain sees."""
        return (self.owner > FREE) & (self.owner <= self.own)

    def stored(self) -> dict[str, Stored]:
        """V, and O in binary: (planes, *site's shape), the lowest digit first.

        An owner that has no room, which only a later domain can be, is written as 0.
        """
        digits = torch.where(self.owner < 2**self.planes, self.owner, FREE)
        planes = torch.stack([(digits >> i) & 1 for i in range(self.planes)])
        return {"weight": self._current().detach(), "owner": Bits.of(planes.bool())}

    def restore(self, stored: Mapping[str, Stored]) -> None:
        weight, bits = cast(Tensor, stored["weight"]), cast(Bits, stored["owner"])
        owner = torch.zeros(weight.shape, dtype=torch.uint8, device=bits.words.device)
        for i, plane in enumerate(bits.unpack()):
            owner |= plane.to(torch.uint8) << i
        self.values, self.learned = weight, None
        self.owner = self.claimed(owner) if self.is_last else owner

    def _current(self) -> Tensor:
        """V, with what is being learned in its place."""
        if self.learned is None:
            return self.values
        return torch.where(self.owner == self.own, self.learned, self.values)


def smallest(weight: Tensor, among: Tensor, share: float) -> Tensor:
    """1[|w| <= the k-th smallest |w|] among some weights of a layer, k = round(share n)."""
    sizes = weight[among].abs()
    rank = round(share * sizes.numel())
    if rank == 0:
        return torch.zeros_like(among)
    return among & (weight.abs() <= kth_smallest(sizes, rank))


def kth_smallest(sizes: Tensor, rank: int) -> Tensor:
    """The size at place `rank` (from 1) among sizes (n,) in order."""
    if sizes.device.type != "cpu" or torch.compiler.is_compiling():
        return sizes.kthvalue(rank).values
    # numpy finds one element of millions in order several times as fast as kthvalue; it knows no bfloat16.
    known = sizes.to(torch.promote_types(sizes.dtype, torch.float32)).numpy()
    return torch.from_numpy(np.partition(known, rank - 1)[rank - 1 : rank]).to(sizes.dtype).squeeze()


def _method(domain: "Domain") -> PackNet:
    if not isinstance(domain.method, PackNet):
        raise MethodError(
            f"a domain by {domain.method.name or type(domain.method).__name__} has no packed "
            "weights; PackNet goes on from domains of its own kind only"
        )
    return domain.method


def _packed(domain: "Domain") -> dict[str, PackedWeight]:
    return {name: cast(PackedWeight, transform) for name, transform in domain.named_transforms()}


def _pairs(domain: "Domain", other: "Domain") -> list[tuple[PackedWeight, PackedWeight]]:
    """The transforms of two domains, site by site."""
    others = _packed(other)
    return [(mine, others[name]) for name, mine in _packed(domain).items()]


PRESETS: dict[str, Method] = {"packnet": PackNet()}
