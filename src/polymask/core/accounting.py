"""What a domain costs: bits by component, #Params as the paper counts it and as stored, and operations.

    #Params = 1 + A (T - 1) / (32 N)

for T domains, the base's own among them, where N is the number of the base's parameters and A the bits that one more
domain takes; no classifier is counted. The paper counts two numbers for a batch norm's channel (scale and shift) in A
and in N. A pack also stores the two statistics: `params_stored` has them in A. What domains share is counted once; what
stands in place of the base's own weights is not counted. A pack holds such tensors all the same, unless they are in a
file beside it: `bits_per_weight(base, domain)` is of the pack.

A multiplication and an addition are two operations. Those of convolutions, matrix products and attention are counted,
as torch's own counter does it; norms, activations and copies are not.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from polymask.core.base import Base
from polymask.core.bits import Bits
from polymask.core.domain import Domain
from polymask.core.heads import head_tensors
from polymask.core.method import Method
from polymask.core.network import named_tensors
from polymask.core.parts import Stored
from polymask.core.registry import create_method, skeleton
from polymask.errors import PolymaskError

COMPONENTS = (
    "mask",
    "scalars",
    "norm_affine",
    "norm_statistics",
    "bias",
    "weights",
    "index",  # which domain owns a weight: kept once for all domains
    "shared",  # tensors kept once for all domains
    "moved",  # what stands in place of the base's own weights, and adds nothing to them
    "sources",  # masks of other domains, which their own packs hold
    "head",
)
_ONCE = ("index", "shared")
_ROUNDED = ("scalars", "norm_affine", "norm_statistics", "bias", "head")  # to 16 bits, once a domain has learned
_EACH = ("mask", "scalars", "norm_affine", "bias", "weights")  # of every domain, in the paper


@dataclass(frozen=True)
class Account:
    """The cost of one domain, and of T of them on one base."""

    base: str
    method: str
    domains: int
    base_parameters: int  # N
    masked_weights: int
    components: dict[str, int]  # bits of one domain
    params_paper: float
    params_stored: float
    bits_per_weight: float  # what one more domain takes without its head, over N

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def account(
    base: Base, method: str | Method, *, domains: int = 2, classes: int = 0, precision: Literal[16, 32] = 32
) -> Account:
    """The cost of `domains` domains, the base's own included, each with a head for `classes`.

    `precision` is that of norms, scalars and head: 32 bits as the paper counts, 16 as `learn` keeps them. Only shapes
    matter: a base on the meta device will do.

        >>> import polymask as pm
        >>> base = pm.load_base("decathlon-wrn28", pretrained=False, device="meta")
        >>> cost = pm.account(base, "affine-full", domains=10)
        >>> cost.components["mask"] == cost.masked_weights == 5_839_280
        True
        >>> f"{cost.params_paper:.2f} as the paper counts, {cost.params_stored:.2f} as stored"
        '1.29 as the paper counts, 1.31 as stored'
    """
    if domains < 1:
        raise PolymaskError(f"domains={domains}; count the base's own domain: at least 1")
    if classes < 0:
        raise PolymaskError(f"classes={classes} cannot be negative")
    if isinstance(method, str):
        method = create_method(method)
    names = [f"class {i}" for i in range(classes)] or None
    domain = skeleton(base, method.for_domains(domains), names)
    return account_fitted(base, [domain], domains=domains, precision=precision)


def account_fitted(base: Base, fitted: Sequence[Domain], *, domains: int, precision: Literal[16, 32] = 32) -> Account:
    """The cost of `domains` domains that are on average like those that have been learned.

    A method may find out only while learning what it stores: CovNorm keeps as many components as it needs.
    """
    method = fitted[-1].method
    found = [component_bits(domain) for domain in fitted]
    if precision == 16:
        found = [{name: n // 2 if name in _ROUNDED else n for name, n in one.items()} for one in found]
    mean = {name: sum(one[name] for one in found) // len(found) for name in COMPONENTS}
    components = found[-1] if method.cumulative else mean  # the last one has all that came before
    size = _parameters(base)
    once = sum(components[name] for name in _ONCE)
    each = sum(components[name] for name in _EACH)
    stored = each + components["norm_statistics"]
    more = max(domains - 1, 1)
    times = 1 if method.cumulative else domains - 1
    transformed = {name for name, transform in fitted[-1].named_transforms() if not transform.keeps_weight}
    return Account(
        base=base.name,
        method=method.name,
        domains=domains,
        base_parameters=size,
        masked_weights=sum(s.numel for n, s in base.sites.items() if n in transformed),
        components=components,
        params_paper=1 + (once + each * times) / (32 * size),
        params_stored=1 + (once + stored * times) / (32 * size),
        bits_per_weight=(once + stored * max(times, 1)) / (more * size),
    )


def bits_per_weight(base: Base, domain: Domain, *, sharing: int | None = None) -> float:
    """Bits of a domain's pack for each parameter of the base, without its head and its rule for unknown images.

    With `sharing` it has its part of what so many domains keep together beside their packs.
    """
    beside, bits = domain.beside(), 0.0
    for name, tensor in domain.stored().items():
        size = _bits(tensor) // (2 if _holds_halves(tensor) else 1)
        if name in beside:
            bits += size / sharing if sharing else 0
        elif not name.startswith(("head/", "unknown/")):
            bits += size
    return bits / _parameters(base)


_UNIT = 2.0**-11  # half of the last place of a number of 16 bits, relative to it


@torch.no_grad()
def in_halves(domain: Domain) -> dict[str, Stored]:
    """Everything that a domain stores, with its norms, scalars and head rounded to numbers that 16 bits hold.

    Numbers of 16 bits have eleven places from 6e-5 to 65504 and fewer below. A tensor is rounded where none of its
    numbers moves by more than 2^-11 of itself or of the tensor's root mean square, whichever is larger; another stays
    as it is. So statistics keep their eleven places however small a layer's variances are, one that is next to nothing
    beside the others of its layer moves by less than a norm's eps lets matter, and what is too large is not touched.
    """
    stored = domain.stored()
    kinds = {f"{place}/{name}": part.component(name) for place, part in domain.named_parts() for name in part.stored()}
    kinds |= {f"norm/{place}/{n}": norm.component(n) for place, norm in domain.named_norms() for n in norm.stored()}
    for name, tensor in stored.items():
        kind = "head" if name.startswith("head/") else kinds.get(name)
        if kind in _ROUNDED and isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
            stored[name] = _rounded(tensor)
    return stored


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    halves = tensor.half().float()
    scale = tensor.double().square().mean().sqrt().float()
    near = (halves - tensor).abs() <= _UNIT * torch.maximum(tensor.abs(), scale)
    return halves if bool(near.all()) else tensor.clone()


def _holds_halves(stored: Stored) -> bool:
    """Whether a pack keeps a tensor of 32 bits in 16."""
    if isinstance(stored, Bits) or stored.dtype != torch.float32 or stored.is_meta:
        return False
    return torch.equal(stored.half().float(), stored)


def component_bits(domain: Domain) -> dict[str, int]:
    """Bits of a domain by component, masks at one bit an element."""
    bits = dict.fromkeys(COMPONENTS, 0)
    for _, part in domain.named_parts():
        for name, stored in part.stored().items():
            bits[part.component(name)] += _bits(stored)
    for _, norm in domain.named_norms():
        for name, stored in norm.stored().items():
            bits["moved" if domain.method.moves_norms else norm.component(name)] += _bits(stored)
    if domain.head is not None:
        bits["head"] = sum(map(_bits, head_tensors(domain.head).values()))
    return bits


def _parameters(base: Base) -> int:
    return sum(p.numel() for p in base.net.parameters())


def _bits(stored: Stored) -> int:
    return stored.numel if isinstance(stored, Bits) else stored.nbytes * 8


def flops(net: nn.Module, input_shape: Sequence[int]) -> int:
    """Operations of one image of `input_shape`, counted while `net` runs on a blank one.

    The network is run as it is, in the mode that it is in. On the meta device nothing is computed.
    """
    like = next((t for _, t in named_tensors(net) if t.is_floating_point()), torch.empty(0))
    blank = torch.zeros(1, *input_shape, device=like.device, dtype=like.dtype)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(blank)
    return int(counter.get_total_flops())


def flops_ratio(base: Base, domain: Domain) -> float:
    """Operations of a domain's compact network, over those of its network of the base's shape.

    1 where a domain drops no channels. Both have the domain's head, and its size of images.
    """
    compact, whole = (flops(domain.merged(base, compact=smaller), domain.input.shape) for smaller in (True, False))
    return compact / whole
