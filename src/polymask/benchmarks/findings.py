"""All that a report says of a benchmark's runs, as numbers; and the short table at the end of a run. Needs no torch.

What masks and scalars look like by layer: the parameter analysis of the paper.

Only of masks that moved: the others look as they were made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from polymask.benchmarks.compare import Comparison, compare_with
from polymask.benchmarks.measures import (
    Forgotten,
    Frontier,
    at_the_end,
    chosen_of,
    find_frontier,
    measure_forgetting,
    protocol_of,
)
from polymask.benchmarks.published import Ablation, Beside, find_ablations, find_published
from polymask.benchmarks.records import ARROWS, LayerStatistics, Outcome, Plan, Runs
from polymask.benchmarks.tables import ResultTable, Row, Statistic, tabulate

FULL = "affine-full"
PAPERS_PIGGYBACK = "piggyback-star-bn"
_PIGGYBACKS = (PAPERS_PIGGYBACK, "piggyback-bn", "piggyback-star", "piggyback")  # nearest first


@dataclass(frozen=True)
class Anatomy:
    """One domain of one method, from its first seed: shares in percent, scalars as they are."""

    method: str
    label: str
    domain: str
    layers: tuple[LayerStatistics, ...]

    @property
    def ones(self) -> float:
        """The share of ones over all weights."""
        total = sum(layer.weights for layer in self.layers)
        return 100 * sum(layer.density * layer.weights for layer in self.layers) / total

    @property
    def early_ones(self) -> float:
        """The mean share of ones in the first third of the layers."""
        return 100 * fmean(layer.density for layer in self.layers[: self._third])

    @property
    def late_ones(self) -> float:
        """The mean share of ones in the last third of the layers."""
        return 100 * fmean(layer.density for layer in self.layers[-self._third :])

    @property
    def opposite(self) -> float:
        """The share of layers whose k1 and k2 have opposite signs."""
        return 100 * fmean(layer.k1 * layer.k2 < 0 for layer in self.layers)

    def magnitude(self, k: str) -> float:
        """The median over layers of |k1|, |k2| or |k3|."""
        return median(self._sizes(k))

    def growth(self, k: str) -> float:
        """The last third's mean magnitude over the first third's; 0 where that is 0."""
        sizes = self._sizes(k)
        early, late = fmean(sizes[: self._third]), fmean(sizes[-self._third :])
        return late / early if early else 0.0

    def _sizes(self, k: str) -> list[float]:
        return [abs(float(getattr(layer, k))) for layer in self.layers]

    @property
    def _third(self) -> int:
        return max(1, len(self.layers) // 3)


def find_anatomies(table: ResultTable) -> tuple[Anatomy, ...]:
    """The Piggyback of the paper's figures, or what comes nearest, and the full model, by domain.

    That is the paper's own implementation, with own norms: "Piggyback* with BN" in its ablation.
    """
    present = {row.method for row in table.rows if len(row.still) < _domains_with_masks(row)}
    chosen = [method for method in _PIGGYBACKS if method in present][:1]
    rows = [table.row(method) for method in (*chosen, FULL)]
    return tuple(
        anatomy
        for row in rows
        if row is not None
        for domain in table.plan.domains
        if (anatomy := _anatomy(row, domain)) is not None
    )


def find_unmoved(table: ResultTable) -> dict[str, tuple[str, ...]]:
    """By label, the domains of Piggyback and the full model whose masks did not move."""
    rows = [table.row(method) for method in (*_PIGGYBACKS, FULL)]
    return {row.label: row.still for row in rows if row is not None and row.still}


def _domains_with_masks(row: Row) -> int:
    return sum(any(one.layers for one in row.found_on(name).values()) for name in row.values)


def which_piggyback(anatomies: Sequence[Anatomy]) -> str:
    """A sentence on whether the Piggyback that is shown is that of the paper's figures."""
    shown = next((one for one in anatomies if one.method != FULL), None)
    papers = "that of the paper’s Figures 3 and 4, its own implementation with own norms"
    if shown is None:
        return f"Piggyback was not run; {PAPERS_PIGGYBACK} is {papers}."
    if shown.method == PAPERS_PIGGYBACK:
        return f"Piggyback ({shown.method}) is {papers}."
    return f"Piggyback is {shown.method} here; {PAPERS_PIGGYBACK}, {papers}, was not run."


def _anatomy(row: Row, domain: str) -> Anatomy | None:
    found = row.found_on(domain)
    if not found or not found[min(found)].layers or domain in row.still:
        return None
    return Anatomy(row.method, row.label, domain, found[min(found)].layers)


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


def summarise(plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Mean test accuracies over seeds with their deviations, as one JSON object."""
    table = tabulate(Runs(plan, tuple(outcomes)))
    return {
        "benchmark": plan.benchmark,
        "base": plan.base,
        "domains": list(plan.domains),
        "seeds": list(plan.seeds),
        "deviations": list(plan.deviations),
        "rows": [_summary_row(plan, row) for row in table.rows if row.outcomes],
    }


def _summary_row(plan: Plan, row: Row) -> dict[str, Any]:
    accuracy = {domain: row.accuracy[domain] for domain in plan.domains}
    return {
        "method": row.method,
        "direction": row.direction,
        "label": f"{row.method}{ARROWS[row.direction]}",
        "params": row.params,
        "seeds": len(row.seeds),
        "accuracy": {domain: one and one.mean for domain, one in accuracy.items()},
        "deviation": {domain: one and one.sd for domain, one in accuracy.items()},
        "share_moved": row.moved and row.moved.share,
        "remark": row.remark,
        "chosen": dict(chosen_of(plan, row.method)),
        "protocol": protocol_of(plan, row),
    }
