"""How far masks moved: the share of their bits that are not as they started.

A mask that stays where it started is a constant. What its row reaches is then due to its norms and
its head, and says nothing of masks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polymask.benchmarks.records import DomainOutcome

# One bit in a thousand. Rows that flipped 0 to 89 of 3.3 million bits, below 0.003 %, were level
# with rows that have no masks; and a thousandth of a layer's weights is not yet another layer.
LEAST_MOVED = 0.001


@dataclass(frozen=True)
class Movement:
    """Bits of masks that are not as they started, and how many there are."""

    flipped: int
    masked: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.flipped / self.masked

    @property
    def is_still(self) -> bool:
        """Whether so few bits moved that nothing follows for the masks."""
        return self.share < LEAST_MOVED


def movement(found: Iterable[DomainOutcome]) -> Movement | None:
    """Of all these masks together; None where there are none, or nobody counted."""
    counted = [(one.flipped, one.masked) for one in found if one.flipped is not None and one.masked]
    masked = sum(bits or 0 for _, bits in counted)
    return Movement(sum(bits for bits, _ in counted), masked) if masked else None


def still_remark(still: Sequence[str], domains: int) -> str:
    """What a reader must know of a row whose masks did not move on some of its domains."""
    if not still:
        return ""
    if len(still) == domains:
        return "its masks did not move: it is its norms and head"
    return f"its masks did not move on {', '.join(still)}: there it is its norms and head"
