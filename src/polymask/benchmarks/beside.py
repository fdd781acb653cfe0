"""Published tables beside a table of runs: which one, on which base, and the domains in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from polymask.benchmarks.domains import BENCHMARKS, DECATHLON, IMAGENET_TO_SKETCH, Benchmark
from polymask.benchmarks.published import (
    AblationRow,
    PublishedTable,
    disagreements,
    published_ablations,
    published_tables,
)
from polymask.benchmarks.reference import canonical
from polymask.benchmarks.score import score
from polymask.benchmarks.tables import ResultTable, Row

LEAST_ABLATIONS = 3  # methods of the ablation that runs must have before it is a table


@dataclass(frozen=True)
class Beside:
    """A published table for a table of runs.

    `shared` gives the runs' name of each published domain that they have. `shared_scores` are the
    published systems' scores over those alone, where they are not all.
    """

    table: PublishedTable
    same_base: bool
    remark: str
    shared: Mapping[str, str]
    shared_scores: Mapping[str, float]
    misprints: Mapping[tuple[str, str], float]  # (system, cell) -> what it should be


@dataclass(frozen=True)
class Ablation:
    """One row of the ablation: k0 … k3, our row if it was run, and what the paper has."""

    method: str
    label: str
    k: tuple[float | Literal["learned"], ...]
    row: Row | None
    published: Mapping[str, Mapping[str, float]]  # by table, then by our name of the domain


def find_published(table: ResultTable) -> Beside | None:
    """The published table for the benchmark, preferably on the same network."""
    plan = table.plan
    choices = [t for t in published_tables().values() if t.benchmark == plan.benchmark]
    if not choices:
        return None
    network = plan.base.rpartition(":")[2]
    same = [t for t in choices if t.base.rpartition(":")[2] == network]
    chosen = (same or choices)[0]
    remark = f"Printed in the paper, measured on {chosen.base}"
    if chosen.benchmark == DECATHLON.name:
        remark += ", rows of other papers on other networks of about its size"
    if not same:
        remark += f"; the runs of this report are on {plan.base}"
    benchmark = BENCHMARKS[plan.benchmark]
    shared = {name: c for c in table.columns if (name := canonical(benchmark, c)) is not None}
    shared = {domain: shared[domain] for domain in benchmark.domains if domain in shared}
    wrong = [found for found in disagreements() if found.table == chosen.name]
    misprints = {(found.system, str(found.cell)): found.recomputed for found in wrong}
    return Beside(chosen, bool(same), f"{remark}.", shared, _shared_scores(chosen, shared), misprints)


def find_ablations(table: ResultTable) -> tuple[Ablation, ...]:
    """The ablation's twelve rows; none where the runs have less than three of its methods."""
    tables = published_ablations()
    rows = next(iter(tables.values()))
    done = [r for r in rows if (found := table.row(r.method)) is not None and found.outcomes]
    if len(done) < LEAST_ABLATIONS:
        return ()
    return tuple(
        Ablation(
            row.method,
            row.label,
            row.k,
            table.row(row.method),
            {name: _ours_only(table, rows[place]) for name, rows in tables.items()},
        )
        for place, row in enumerate(rows)
    )


def _shared_scores(table: PublishedTable, shared: Mapping[str, str]) -> dict[str, float]:
    benchmark = BENCHMARKS[table.benchmark]
    if not shared or len(shared) == len(benchmark.domains):
        return {}
    reference = benchmark.reference or table.reference
    if reference is None:
        return {}
    part = Benchmark(table.benchmark, dict.fromkeys(shared, ()))
    return {
        system: score(
            part,
            {domain: row.accuracy[domain] for domain in shared},
            reference={domain: reference[domain] for domain in shared},
        ).score
        for system, row in table.rows.items()
    }


def _ours_only(table: ResultTable, row: AblationRow) -> dict[str, float]:
    """A published row's accuracies on the domains that the runs have, by our names for them."""
    names = {domain: canonical(IMAGENET_TO_SKETCH, domain) for domain in table.plan.domains}
    return {ours: row.accuracy[name] for ours, name in names.items() if name in row.accuracy}
