"""All that a report says of a benchmark's runs, as numbers."""

from dataclasses import asdict, dataclass
from typing import Any

from polymask.benchmarks.anatomy import FULL, Anatomy, find_anatomies
from polymask.benchmarks.beside import Ablation, Beside, find_ablations, find_published
from polymask.benchmarks.forgotten import Forgotten, measure_forgetting
from polymask.benchmarks.frontier import Frontier, find_frontier
from polymask.benchmarks.records import Runs
from polymask.benchmarks.tables import ResultTable, Row, Statistic, tabulate


@dataclass(frozen=True)
class Findings:
    """The table of results, and what follows from it; parts without data are empty."""

    table: ResultTable
    published: Beside | None
    ablations: tuple[Ablation, ...]
    frontier: Frontier
    forgotten: Forgotten
    anatomies: tuple[Anatomy, ...]

    def to_json(self) -> dict[str, Any]:
        """The tables as one JSON object."""
        plan, reference = self.table.plan, self.table.reference
        return {
            "benchmark": plan.benchmark,
            "base": plan.base,
            "domains": list(plan.domains),
            "own": self.table.own,
            "seeds": list(plan.seeds),
            "deviations": list(plan.deviations),
            "reference": None if reference.accuracy is None else dict(reference.accuracy),
            "whole_benchmark": reference.whole,
            "remark": reference.remark,
            "missing": list(self.table.missing),
            "rows": [_row(row) for row in self.table.rows],
            "published": None if self.published is None else _published(self.published),
            "ablation": [_ablation(row, self.table) for row in self.ablations],
            "frontier": asdict(self.frontier),
            "forgetting": asdict(self.forgotten),
            "layers": [_anatomy(one) for one in self.anatomies],
        }


def find(runs: Runs) -> Findings:
    """Compute every table of a report."""
    table = tabulate(runs)
    return Findings(
        table,
        find_published(table),
        find_ablations(table),
        find_frontier(table),
        measure_forgetting(table),
        find_anatomies(table),
    )


def _row(row: Row) -> dict[str, Any]:
    return {
        "method": row.method,
        "direction": row.direction,
        "label": row.label,
        "params": row.params,
        "params_stored": row.params_stored,
        "bits_per_weight": row.bits_per_weight,
        "pack_bytes": row.pack_bytes,
        "seconds": row.seconds,
        "accuracy": {column: _statistic(one) for column, one in row.accuracy.items()},
        "mean": row.mean,
        "score": None if row.score is None else row.score.score,
        "points": None if row.score is None else row.score.per_domain,
        "score_by_seed": _statistic(row.score_by_seed),
        "score_per_param": row.score_per_param,
    }


def _published(beside: Beside) -> dict[str, Any]:
    return {
        "table": beside.table.name,
        "base": beside.table.base,
        "same_base": beside.same_base,
        "shared": dict(beside.shared),
        "rows": [
            asdict(row) | {"shared_score": beside.shared_scores.get(system)}
            for system, row in beside.table.rows.items()
        ],
    }


def _ablation(row: Ablation, table: ResultTable) -> dict[str, Any]:
    ours = {} if row.row is None else row.row.accuracy
    return {
        "method": row.method,
        "label": row.label,
        "k": list(row.k),
        "accuracy": {domain: _statistic(ours.get(domain)) for domain in table.plan.domains},
        "published": {name: dict(accuracy) for name, accuracy in row.published.items()},
    }


def _anatomy(one: Anatomy) -> dict[str, Any]:
    found: dict[str, Any] = {
        "method": one.method,
        "domain": one.domain,
        "ones": one.ones,
        "ones_first_third": one.early_ones,
        "ones_last_third": one.late_ones,
    }
    if one.method == FULL:
        scalars = ("k1", "k2", "k3")
        found["median_magnitude"] = {k: one.magnitude(k) for k in scalars}
        found["last_over_first_third"] = {k: one.growth(k) for k in scalars}
        found["k1_k2_opposite"] = one.opposite
    return found


def _statistic(one: Statistic | None) -> dict[str, Any] | None:
    return None if one is None else asdict(one)
