"""All that a report says of a benchmark's runs, as numbers; and the short table at the end of a run. Needs no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from polymask.benchmarks.compare import Comparison, Frontier, compare_with, find_frontier
from polymask.benchmarks.published import Ablation, PublishedMatch, find_ablations, find_published
from polymask.benchmarks.records import ARROWS, LayerStatistics, Outcome, Plan, Runs
from polymask.benchmarks.tables import ResultRow, ResultTable, Statistic, protocol_of, statistic, tabulate

FULL = "affine-full"
PAPERS_PIGGYBACK = "piggyback-star-bn"
_PIGGYBACKS = (PAPERS_PIGGYBACK, "piggyback-bn", "piggyback-star", "piggyback")  # nearest first
COMPARED_WITH = ("finetune", FULL)  # whom every row is compared with
SCALARS = ("k1", "k2", "k3")


@dataclass(frozen=True)
class LayerSummary:
    """One domain of one method, from its first seed, by layer: shares in percent, scalars as they are.

    This is the parameter analysis of the paper. Only for masks that moved: the others look as they were made.
    """

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

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "method": self.method,
            "domain": self.domain,
            "ones": self.ones,
            "ones_first_third": self.early_ones,
            "ones_last_third": self.late_ones,
        }
        if self.method == FULL:
            found["median_magnitude"] = {k: self.magnitude(k) for k in SCALARS}
            found["last_over_first_third"] = {k: self.growth(k) for k in SCALARS}
            found["k1_k2_opposite"] = self.opposite
        return found

    def _sizes(self, k: str) -> list[float]:
        return [abs(float(getattr(layer, k))) for layer in self.layers]

    @property
    def _third(self) -> int:
        return max(1, len(self.layers) // 3)


def summarise_layers(table: ResultTable) -> tuple[LayerSummary, ...]:
    """The Piggyback of the paper's figures, or what comes nearest, and the full model, by domain.

    That is the paper's own implementation, with own norms: "Piggyback* with BN" in its ablation.
    """
    found: dict[str, list[LayerSummary]] = {}
    for method in (*_PIGGYBACKS, FULL):
        if (row := table.row(method)) is None:
            continue
        still = row.still
        for domain in table.plan.domains:
            outcomes = row.found_on(domain)
            layers = outcomes[min(outcomes)].layers if outcomes else ()
            if layers and domain not in still:
                found.setdefault(method, []).append(LayerSummary(method, row.label, domain, layers))
    piggyback = next((method for method in found if method != FULL), "")
    return (*found.get(piggyback, ()), *found.get(FULL, ()))


def find_unmoved(table: ResultTable) -> dict[str, tuple[str, ...]]:
    """By label, the domains of Piggyback and the full model whose masks did not move."""
    rows = [table.row(method) for method in (*_PIGGYBACKS, FULL)]
    return {row.label: row.still for row in rows if row is not None and row.still}


def which_piggyback(summaries: Sequence[LayerSummary]) -> str:
    """A sentence on whether the Piggyback that is shown is that of the paper's figures."""
    shown = next((one.method for one in summaries if one.method != FULL), None)
    papers = "that of the paper’s Figures 3 and 4, its own implementation with own norms"
    if shown is None:
        return f"Piggyback was not run; {PAPERS_PIGGYBACK} is {papers}."
    if shown == PAPERS_PIGGYBACK:
        return f"Piggyback ({shown}) is {papers}."
    return f"Piggyback is {shown} here; {PAPERS_PIGGYBACK}, {papers}, was not run."


@dataclass(frozen=True)
class BaseLoss:
    """How the base changed: relative change of its weights, agreement and accuracy in percent.

    `agreement` is the share of the domains' images that its classifier still puts in the same class; the accuracies are
    on its own domain.
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


def _loss(table: ResultTable, row: ResultRow) -> Loss:
    lost: dict[str, Statistic | None] = {}
    for domain in table.plan.domains:
        lost[domain] = statistic(
            one.learned - one.test_accuracy
            for one in row.found_on(domain).values()
            if one.learned is not None and one.test_accuracy is not None
        )
    means = [one.mean for one in lost.values() if one is not None]
    whole = fmean(means) if len(means) == len(lost) else None
    after = [o.base_after for o in row.outcomes if o.base_after is not None]
    names = ("change", "agreement", "accuracy_before", "accuracy_after")
    base = [statistic(value for found in after if (value := found.get(name)) is not None) for name in names]
    return Loss(row.label, lost, whole, BaseLoss(*base) if after else None)


@dataclass(frozen=True)
class Findings:
    """The table of results, and what follows from it; parts without data are empty."""

    table: ResultTable
    published: PublishedMatch | None
    ablations: tuple[Ablation, ...]
    frontier: Frontier
    forgotten: Forgotten
    layers: tuple[LayerSummary, ...]
    unmoved: Mapping[str, tuple[str, ...]]  # by label, domains that `layers` leaves out
    comparisons: Mapping[str, tuple[Comparison, ...]]  # by whom they are with

    def to_json(self) -> dict[str, Any]:
        plan, reference = self.table.plan, self.table.reference
        return _plan_json(plan) | {
            "own": self.table.own,
            "reference": None if reference.accuracy is None else dict(reference.accuracy),
            "whole_benchmark": reference.whole,
            "remark": reference.remark,
            "missing": list(self.table.missing),
            "rows": [_row_json(row, plan) for row in self.table.rows],
            "tuning": {method: asdict(one) | {"at_the_end": one.at_the_end} for method, one in plan.tuning.items()},
            "comparisons": {other: [one.to_json() for one in found] for other, found in self.comparisons.items()},
            "published": None if self.published is None else self.published.to_json(),
            "ablation": [_ablation_json(row, plan.domains) for row in self.ablations],
            "frontier": asdict(self.frontier),
            "forgetting": asdict(self.forgotten),
            "layers": [one.to_json() for one in self.layers],
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
        summarise_layers(table),
        find_unmoved(table),
        {other: found for other in COMPARED_WITH if (found := compare_with(table, other))},
    )


def summarise(plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Mean test accuracies over seeds with their deviations, as one JSON object."""
    table = tabulate(Runs(plan, tuple(outcomes)))
    return _plan_json(plan) | {"rows": [_summary_json(row, plan) for row in table.rows if row.outcomes]}


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "benchmark": plan.benchmark,
        "base": plan.base,
        "domains": list(plan.domains),
        "seeds": list(plan.seeds),
        "deviations": list(plan.deviations),
    }


def _training_json(row: ResultRow, plan: Plan) -> dict[str, Any]:
    return {
        "method": row.method,
        "direction": row.direction,
        "params": row.params,
        "share_moved": row.moved and row.moved.share,
        "remark": row.remark,
        "chosen": dict(plan.chosen(row.method)),
        "protocol": protocol_of(plan, row),
    }


def _summary_json(row: ResultRow, plan: Plan) -> dict[str, Any]:
    accuracy = {domain: row.accuracy[domain] for domain in plan.domains}
    return _training_json(row, plan) | {
        "label": f"{row.method}{ARROWS[row.direction]}",
        "seeds": len(row.seeds),
        "accuracy": {domain: one and one.mean for domain, one in accuracy.items()},
        "deviation": {domain: one and one.sd for domain, one in accuracy.items()},
    }


def _row_json(row: ResultRow, plan: Plan) -> dict[str, Any]:
    moved, score = row.moved, row.score
    return _training_json(row, plan) | {
        "label": row.label,
        "params_stored": row.params_stored,
        "bits_per_weight": row.bits_per_weight,
        "pack_bytes": row.pack_bytes,
        "seconds": row.seconds,
        "accuracy": {column: one and asdict(one) for column, one in row.accuracy.items()},
        "mean": row.mean,
        "mean_by_seed": row.mean_by_seed and asdict(row.mean_by_seed),
        "seeds": list(row.seeds),
        "bits_flipped": moved and moved.flipped,
        "bits_masked": moved and moved.masked,
        "still": list(row.still),
        "score": row.whole_score,
        "points": score and score.per_domain,
        "score_by_seed": row.score_by_seed and asdict(row.score_by_seed),
        "score_per_param": row.score_per_param,
    }


def _ablation_json(row: Ablation, domains: Iterable[str]) -> dict[str, Any]:
    ours = {} if row.row is None else row.row.accuracy
    return {
        "method": row.method,
        "label": row.label,
        "k": list(row.k),
        "accuracy": {domain: (one := ours.get(domain)) and asdict(one) for domain in domains},
        "published": {name: dict(accuracy) for name, accuracy in row.published.items()},
    }
