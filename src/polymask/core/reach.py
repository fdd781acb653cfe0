"""How much of a base a method reaches: one that finds next to nothing to adapt is refused."""

from typing import TYPE_CHECKING

from polymask.errors import MethodError

if TYPE_CHECKING:
    from polymask.core.domain import Domain

_FEW = 0.1  # of a base's sites: fewer are practically none


def check_reach(domain: "Domain") -> None:
    """Raise where the method finds next to no site that it is made for.

    Such a domain would be norms and a head under the method's name. Adapters of spatial kernels
    find none in a transformer, or just the one that embeds patches.
    """
    method, sites = domain.method, domain.sites
    reached = [name for name, transform in domain.named_transforms() if transform.adapts]
    if method.leaves_sites or len(reached) >= _FEW * len(sites):
        return
    options = method.options()
    wider = [f"{name}={value!r}" for name, value in method.wider.items() if options[name] != value]
    only = f" ({', '.join(reached[:3])})" if reached else ""
    raise MethodError(
        f"{method.name or type(method).__name__} adapts {len(reached)} of {len(sites)} sites of "
        f"base {domain.base_name}{only}, so little but norms and head would learn; "
        + "".join(f"make it with {option}, or " for option in wider)
        + "take a method for layers of every kind, affine-full or lora-conv"
    )
