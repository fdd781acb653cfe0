"""What rows of a table are measured by besides accuracy: their training, the frontier of size, what they forget.

Who is on the frontier of size and quality: nobody else is as small and as good.

Rows whose masks did not move are neither on it nor in anyone's way: their quality is not that of
what they store.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from polymask.benchmarks.records import Plan, Tuned
from polymask.benchmarks.tables import ResultTable, Row, Statistic, statistic

# One bit in a thousand. Rows that flipped 0 to 89 of 3.3 million bits, below 0.003 %, were level
# with rows that have no masks; and a thousandth of a layer's weights is not yet another layer.


def chosen_of(plan: Plan, method: str) -> Mapping[str, Any]:
    """The fields that a search chose for a method; none where there was no search."""
    return plan.tuning[method].chosen if method in plan.tuning else {}


def protocol_of(plan: Plan, row: Row) -> dict[str, Any]:
    """The fields in which a row was trained differently from the plan's recipe.

    What its results say counts; where they say nothing, what the plan says of it.
    """
    asked = {**plan.protocols.get(row.method, {}), **chosen_of(plan, row.method)}
    trained = next((o.recipe for o in row.outcomes if o.recipe), {})
    known = {name: value for name, value in trained.items() if name in plan.recipe}
    return {
        name: value
        for name, value in {**asked, **known}.items()
        if name != "name" and not (name in plan.recipe and _equal(value, plan.recipe[name]))
    }


def at_the_end(tuned: Tuned) -> dict[str, str]:
    """Fields whose chosen value is the "smallest" or the "largest" that was tried."""
    found = {}
    for name, value in tuned.chosen.items():
        tried = [trial.values.get(name) for trial in tuned.trials]
        numbers = [n for n in tried if isinstance(n, int | float) and not isinstance(n, bool)]
        if len(set(numbers)) > 1 and value in (min(numbers), max(numbers)):
            found[name] = "smallest" if value == min(numbers) else "largest"
    return found


def settings_text(settings: Mapping[str, Any]) -> str:
    """{"rate": 0.001} -> "rate=0.001"."""
    return ", ".join(f"{name}={value_text(value)}" for name, value in settings.items())


def value_text(value: Any) -> str:
    """A field's value as one would write it on a command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(value_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _equal(a: Any, b: Any) -> bool:
    """Whether they are the same once they are written down: (4,) is [4]."""
    return json.dumps(a) == json.dumps(b)


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


@dataclass(frozen=True)
class BaseLoss:
    """What became of the base: relative change of its weights, agreement and accuracy in percent.

    `agreement` is the share of the domains' images that its classifier still puts in the same
    class; the accuracies are on its own domain.
    """

    change: Statistic | None
    agreement: Statistic | None
    before: Statistic | None
    after: Statistic | None


@dataclass(frozen=True)
class Loss:
    """Points of test accuracy that each domain lost after it was learned; below 0 it gained."""

    label: str
    lost: Mapping[str, Statistic | None]  # by domain, where domains were learned in one job
    mean: float | None  # over the domains, where all are there
    base: BaseLoss | None


@dataclass(frozen=True)
class Forgotten:
    """Methods that may forget, and those that cannot: they learn each domain by itself."""

    losses: tuple[Loss, ...]
    safe: tuple[str, ...]


def measure_forgetting(table: ResultTable) -> Forgotten:
    """Compare every domain right after its training with the end of its job."""
    done = [row for row in table.rows if row.outcomes]
    risky = [row for row in done if row.direction or row.moves_base]
    safe = tuple(row.label for row in done if row not in risky)
    return Forgotten(tuple(_loss(table, row) for row in risky), safe)


def _loss(table: ResultTable, row: Row) -> Loss:
    lost: dict[str, Statistic | None] = {}
    for domain in table.plan.domains:
        lost[domain] = statistic(
            one.learned - one.test_accuracy
            for one in row.found_on(domain).values()
            if one.learned is not None and one.test_accuracy is not None
        )
    means = [one.mean for one in lost.values() if one is not None]
    whole = fmean(means) if len(means) == len(lost) else None
    return Loss(row.label, lost, whole, _base_loss(row) if row.moves_base else None)


def _base_loss(row: Row) -> BaseLoss:
    def over_jobs(name: str) -> Statistic | None:
        found = [o.base_after.get(name) for o in row.outcomes if o.base_after is not None]
        return statistic(value for value in found if value is not None)

    return BaseLoss(
        over_jobs("change"),
        over_jobs("agreement"),
        over_jobs("accuracy_before"),
        over_jobs("accuracy_after"),
    )
