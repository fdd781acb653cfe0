"""What a domain costs: bits by component, and #Params as the paper counts it and as stored.

    #Params = 1 + A (T - 1) / (32 N)

for T domains, the base's own among them, where N is the number of the base's parameters and A the
bits that one more domain takes; no classifier is counted. The paper counts two numbers for a batch
norm's channel (scale and shift) in A and in N. A pack also stores the two statistics:
`params_stored` has them in A.
"""

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from polymask.base import Base
from polymask.bits import Bits
from polymask.domain import Domain, skeleton
from polymask.errors import PolymaskError
from polymask.methods import Method, Stored, create_method

COMPONENTS = ("mask", "scalars", "norm_affine", "norm_statistics", "bias", "weights", "head")
_NOT_IN_PAPER = ("norm_statistics", "head")


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
    bits_per_weight: float  # all but the head, over N

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def account(base: Base, method: str | Method, *, domains: int = 2, classes: int = 0) -> Account:
    """The cost of `domains` domains, the base's own included, each with a head for `classes`.

    Only shapes matter: a base on the meta device will do.
    """
    if domains < 1:
        raise PolymaskError(f"domains={domains}; count the base's own domain: at least 1")
    if classes < 0:
        raise PolymaskError(f"classes={classes} cannot be negative")
    if isinstance(method, str):
        method = create_method(method)
    names = [f"class {i}" for i in range(classes)] or None
    domain = skeleton(base, method, names)
    components = component_bits(domain)
    size = sum(p.numel() for p in base.net.parameters())
    paper = sum(bits for name, bits in components.items() if name not in _NOT_IN_PAPER)
    stored = sum(bits for name, bits in components.items() if name != "head")
    return Account(
        base=base.name,
        method=method.name,
        domains=domains,
        base_parameters=size,
        masked_weights=sum(s.numel for n, s in base.sites.items() if n in _transformed(domain)),
        components=components,
        params_paper=1 + paper * (domains - 1) / (32 * size),
        params_stored=1 + stored * (domains - 1) / (32 * size),
        bits_per_weight=stored / size,
    )


def bits_per_weight(base: Base, domain: Domain) -> float:
    """Bits that a domain stores, without its head, for each parameter of the base."""
    bits = sum(bits for name, bits in component_bits(domain).items() if name != "head")
    return bits / sum(p.numel() for p in base.net.parameters())


def component_bits(domain: Domain) -> dict[str, int]:
    """Bits of a domain by component, masks at one bit an element."""
    bits = dict.fromkeys(COMPONENTS, 0)
    for _, transform in domain.named_transforms():
        for name, stored in transform.stored().items():
            bits[transform.components[name]] += _bits(stored)
    for _, norm in domain.named_norms():
        for name, stored in norm.stored().items():
            is_statistic = name in norm._buffers
            bits["norm_statistics" if is_statistic else "norm_affine"] += _bits(stored)
    if domain.head is not None:
        bits["head"] = sum(_bits(p) for p in domain.head.parameters())
    return bits


def _transformed(domain: Domain) -> set[str]:
    return {name for name, _ in domain.named_transforms()}


def _bits(stored: Stored) -> int:
    if isinstance(stored, Bits):
        return stored.numel
    assert isinstance(stored, Tensor)
    return stored.numel() * stored.element_size() * 8
