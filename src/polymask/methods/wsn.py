"""WSN: every domain selects a subnetwork of one network, and trains what no domain before it has selected.

    W~ = V∘M,        M = 1[|R| >= the k-th largest |R|],        k = round(c n)

V is the weight that the domains share, which starts as the base's, R a domain's scores and n the weights of a layer.
Scores and weights learn together. With G = dE/dW~, and F = 1 where an earlier domain has selected a weight,

    dV = G∘M∘(1 - F),        dR = sign(R)∘V∘G

so a domain may use all that is there, frozen or free, and trains what it uses and nobody before it does. What a domain
has selected never changes again, so no domain forgets. Nothing runs out either: where all is frozen a domain still
selects. The base is as it was: V is a network of its own, kept once for all domains in a file beside their packs, and a
domain is its mask.

Scores start at |V|: a fresh domain has the largest weights of each layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from polymask.core.method import Method
from polymask.core.network import structural_copy
from polymask.core.parts import MaskTransform, NormPolicy, Stored
from polymask.core.survey import Site
from polymask.errors import MethodError
from polymask.methods.packnet import kth_smallest

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain


@dataclass(frozen=True, kw_only=True)
class WSN(Method):
    """W~ = V∘M with the largest scores of each layer; `share` is c, the part of its weights that a domain selects."""

    norms: NormPolicy = "stats"
    share: float = 0.5

    title: ClassVar[str] = "WSN (Winning SubNetworks)"
    reference: ClassVar[str] = "Kang et al., ICML 2022"
    differences: ClassVar[str] = (
        "The original's network starts at random and has no domain but those that it learns. Here it starts as a copy "
        "of the pretrained base, which stays as it is, so the shared weight is a second network and is counted, once. "
        "The original's scores start at random and, in its code, go on from one task to the next; here every domain's "
        "start at the sizes of the shared weight, so that a fresh one keeps the larger of the pretrained weights. "
        "Biases are the base's; the original selects among them where there are some. Batch norms have the base's "
        "scale and shift and own statistics; those of the original's ResNet-18 have neither scale nor shift, and take "
        "the statistics of each batch. Masks are stored at one bit a weight, where the original codes those of several "
        "tasks together by Huffman's code."
    )
    ordered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("share", 0.001, 1)

    def transform(self, site: Site) -> "SelectedWeight":
        return SelectedWeight(site, self.share)

    def follow(self, domain: "Domain", earlier: Sequence["Domain"]) -> None:
        """Take over the shared weight from the last domain; what they all have selected is frozen."""
        if not earlier:
            return
        _check_one_weight(earlier)
        before = [_selected(other) for other in earlier]
        for name, mine in _selected(domain).items():
            taken = torch.stack([its[name].mask() for its in before]).any(0)
            mine.hold(before[-1][name].current().detach(), taken)

    def settle(self, base: "Base", domains: Sequence["Domain"]) -> "Sequence[Domain]":
        """Copies that share one weight, the last domain's."""
        if not domains:
            return domains
        _check_one_weight(domains)
        last = _selected(domains[-1])
        settled = [*map(structural_copy, domains[:-1]), domains[-1]]
        for domain in settled:
            for name, mine in _selected(domain).items():
                mine.values = last[name].values
        return settled


class SelectedWeight(MaskTransform):
    """One site's V, its scores (or, stored, its packed mask), and what is learned in V's place where none is frozen."""

    components: ClassVar[Mapping[str, str]] = {"mask": "mask", "weight": "shared"}
    beside: ClassVar[tuple[str, ...]] = ("weight",)

    values: Tensor
    taken: Tensor | None
    learned: nn.Parameter | None

    def __init__(self, site: Site, share: float) -> None:
        super().__init__()
        self.shape, self.share = site.shape, share
        self.register_buffer("values", torch.zeros(site.shape, dtype=site.learned_dtype))
        self.register_buffer("taken", torch.zeros(site.shape, dtype=torch.bool))
        self.register_buffer("words", None)
        self.learned = nn.Parameter(torch.zeros(site.shape, dtype=site.learned_dtype))
        self.scores = nn.Parameter(torch.zeros(site.shape, dtype=site.learned_dtype))

    def begin(self, base_weight: Tensor) -> None:
        """V is the base's weight, and all of it is free."""
        self.hold(base_weight, torch.zeros_like(base_weight, dtype=torch.bool))

    @torch.no_grad()
    def hold(self, values: Tensor, taken: Tensor) -> None:
        """A copy of V to learn on where it is not taken, and scores of its sizes."""
        assert self.learned is not None
        assert self.scores is not None
        self.values = values.to(self.learned, copy=True)
        self.taken = taken.to(self.learned.device)
        self.learned.copy_(self.values)
        self.scores.copy_(self.values.abs())

    def weight(self, base_weight: Tensor) -> Tensor:
        """V∘M; gradients reach what is selected and free, and all scores."""
        if self.scores is None:
            return (self.values * self.mask()).to(base_weight.dtype)
        mask = _Selection.apply(self.scores.abs(), self.share)  # type: ignore[no-untyped-call]
        return cast(Tensor, self.current() * mask).to(base_weight.dtype)

    def mask_of(self, scores: Tensor) -> Tensor:
        return largest(scores.abs(), self.share)

    def current(self) -> Tensor:
        """V, with what is being learned in its place."""
        if self.learned is None or self.taken is None:
            return self.values
        return torch.where(self.taken, self.values, self.learned)

    def weight_parameters(self) -> list[nn.Parameter]:
        return [] if self.learned is None else [self.learned]

    def stored(self) -> dict[str, Stored]:
        return super().stored() | {"weight": self.current().detach()}

    def restore(self, stored: Mapping[str, Stored]) -> None:
        super().restore(stored)
        self.values, self.taken, self.learned = cast(Tensor, stored["weight"]), None, None


class _Selection(torch.autograd.Function):
    """The mask of the largest sizes, as numbers; the gradient goes straight through."""

    @staticmethod
    def forward(sizes: Tensor, share: float) -> Tensor:
        return largest(sizes, share).to(sizes.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is needed for the way back."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def largest(sizes: Tensor, share: float) -> Tensor:
    """1[s >= the k-th largest s] over all sizes of a layer, k = round(share n) and at least 1."""
    if sizes.is_meta:  # only the shape is wanted
        return torch.empty_like(sizes, dtype=torch.bool)
    count = sizes.numel()
    return sizes >= kth_smallest(sizes.detach().flatten(), count - max(1, round(share * count)) + 1)


def _check_one_weight(domains: Sequence["Domain"]) -> None:
    """Raise unless the last domain's V has what every domain has selected as that one knows it."""
    last = _selected(domains[-1])
    for place, domain in enumerate(domains[:-1], start=1):
        for name, its in _selected(domain).items():
            mask = its.mask()
            if not torch.equal(its.current()[mask], last[name].current()[mask]):
                raise MethodError(
                    f"domain {place} of {len(domains)} selected weights of {name} that the last one has trained over; "
                    "give the domains in the order in which they were learned, each after all before it (fit_all)"
                )


def _selected(domain: "Domain") -> dict[str, SelectedWeight]:
    if not isinstance(domain.method, WSN):
        raise MethodError(
            f"a domain by {domain.method.name or type(domain.method).__name__} has selected no weights; WSN goes on "
            "from domains of its own kind only"
        )
    return {name: cast(SelectedWeight, transform) for name, transform in domain.named_transforms()}


PRESETS: dict[str, Method] = {"wsn": WSN()}
