"""What methods forget: of domains that they learned earlier, and of the base."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from polymask.benchmarks.tables import ResultTable, Row, Statistic, statistic


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
