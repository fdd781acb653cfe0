"""All that a report says of a benchmark's runs, as numbers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from polymask.benchmarks.anatomy import FULL, Anatomy, find_anatomies, find_unmoved
from polymask.benchmarks.beside import Ablation, Beside, find_ablations, find_published
from polymask.benchmarks.compare import Comparison, compare_with
from polymask.benchmarks.forgotten import Forgotten, measure_forgetting
from polymask.benchmarks.frontier import Frontier, find_frontier
from polymask.benchmarks.records import Plan, Runs
from polymask.benchmarks.tables import ResultTable, Row, Statistic, tabulate
from polymask.benchmarks.training import at_the_end, chosen_of, protocol_of

COMPARED_WITH = ("finetune", FULL)  # whom every row is compared with


@dataclass(frozen=True)
class Findings:
    """The table of results, and what follows from it; parts without data are empty."""

    table: ResultTable
    published: Beside | None
    ablations: tuple[Ablation, ...]
    frontier: Frontier
    forgotten: Forgotten
    anatomies: tuple[Anatomy, ...]
    unmoved: Mapping[str, tuple[str, ...]]  # by label, domains that anatomies leave out
    comparisons: Mapping[str, tuple[Comparison, ...]]  # by whom they are with

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
            "rows": [_row(row, plan) for row in self.table.rows],
            "tuning": {
                method: asdict(tuned) | {"at_the_end": at_the_end(tuned)} for method, tuned in plan.tuning.items()
            },
            "comparisons": {other: [one.to_json() for one in found] for other, found in self.comparisons.items()},
            "published": None if self.published is None else _published(self.published),
            "ablation": [_ablation(row, self.table) for row in self.ablations],
            "frontier": asdict(self.frontier),
            "forgetting": asdict(self.forgotten),
            "layers": [_anatomy_numbers(one) for one in self.anatomies],
            "layers_left_out": {label: list(still) for label, still in self.unmoved.items()},
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
        find_unmoved(table),
        {other: found for other in COMPARED_WITH if (found := compare_with(table, other))},
    )


def _row(row: Row, plan: Plan) -> dict[str, Any]:
    moved = row.moved
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
        "mean_by_seed": _statistic(row.mean_by_seed),
        "seeds": list(row.seeds),
        "bits_flipped": None if moved is None else moved.flipped,
        "bits_masked": None if moved is None else moved.masked,
        "share_moved": None if moved is None else moved.share,
        "still": list(row.still),
        "remark": row.remark,
        "chosen": dict(chosen_of(plan, row.method)),
        "protocol": protocol_of(plan, row),
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


def _anatomy_numbers(one: Anatomy) -> dict[str, Any]:
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
