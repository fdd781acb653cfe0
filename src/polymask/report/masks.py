"""The masks of a domain at a glance, whatever method they are of."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polymask.core.bits import Bits

if TYPE_CHECKING:
    from polymask.core.domain import Domain


@dataclass(frozen=True)
class MaskStatistics:
    """One site's bits: how many, and the share of ones."""

    site: str
    depth: int  # 0 is the first site that has bits
    weights: int
    density: float  # 0 … 1


def mask_statistics(domain: "Domain") -> tuple[MaskStatistics, ...]:
    """The bits of every site that has some, in the base's order."""
    found: list[MaskStatistics] = []
    for site, transform in domain.named_transforms():
        masks = [stored for stored in transform.stored().values() if isinstance(stored, Bits)]
        weights = sum(mask.numel for mask in masks)
        if weights:
            ones = sum(int.from_bytes(mask.to_bytes(), "little").bit_count() for mask in masks)
            found.append(MaskStatistics(site, len(found), weights, ones / weights))
    return tuple(found)
