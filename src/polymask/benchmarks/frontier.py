"""Who is on the frontier of size and quality: nobody else is as small and as good.

Rows whose masks did not move are neither on it nor in anyone's way: their quality is not that of
what they store.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from polymask.benchmarks.tables import ResultTable


@dataclass(frozen=True)
class Point:
    """A row's size and quality."""

    label: str
    params: float  # #Params, the paper's convention
    overhead: float  # bits that a domain adds, over the base's weights
    value: float  # the score, or the mean accuracy in percent
    on_frontier: bool = False
    still: bool = False  # its masks did not move, on some domain at least


@dataclass(frozen=True)
class Frontier:
    """The rows that are complete, smallest first, and what they are compared by."""

    measure: Literal["score", "mean accuracy"]
    points: tuple[Point, ...]

    @property
    def members(self) -> tuple[Point, ...]:
        """Those on the frontier, from the smallest to the best."""
        return tuple(point for point in self.points if point.on_frontier)

    @property
    def left_out(self) -> tuple[Point, ...]:
        """Those whose masks did not move."""
        return tuple(point for point in self.points if point.still)


def find_frontier(table: ResultTable) -> Frontier:
    """Compare rows by their scores; where nothing is scored, by mean accuracy."""
    scored = any(row.score is not None for row in table.rows)
    points = []
    for row in table.rows:
        whole = None if row.score is None else row.score.score
        value = whole if scored else row.mean
        overhead = row.overhead(len(table.plan.domains))
        if value is not None and row.params is not None and overhead is not None:
            points.append(Point(row.label, row.params, overhead, value, still=bool(row.still)))
    points.sort(key=lambda point: (point.params, -point.value))
    compared = [point for point in points if not point.still]
    placed = tuple(replace(p, on_frontier=not p.still and not _is_beaten(p, compared)) for p in points)
    return Frontier("score" if scored else "mean accuracy", placed)


def _is_beaten(point: Point, others: Sequence[Point]) -> bool:
    """Whether another is no larger and no worse, and better in one of the two."""
    return any(
        other.params <= point.params
        and other.value >= point.value
        and (other.params, other.value) != (point.params, point.value)
        for other in others
    )
