"""What the paper and its rivals printed: as data, recomputed, and beside a table of runs.

What the paper and its rivals printed: tables as data, and what they come to when recomputed.

The paper is Mancini et al., arXiv 2103.13894. Its numbers are in published.json as they are
printed, right or wrong; `disagreements` finds those that its own accuracies do not allow.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from polymask.benchmarks.score import Score, canonical, score
from polymask.benchmarks.suites import BENCHMARKS, DECATHLON, IMAGENET_TO_SKETCH, Benchmark
from polymask.benchmarks.tables import ResultTable, Row
from polymask.errors import BenchmarkError, near_matches


@dataclass(frozen=True)
class PublishedRow:
    """One system in one of the paper's tables of results.

    `system` is its name in the table, `method` the one it has in polymask, where it has one.
    """

    system: str
    method: str | None
    label: str
    params: float
    accuracy: dict[str, float]
    score: int
    score_per_param: int


@dataclass(frozen=True)
class PublishedTable:
    """A table of results: one benchmark, accuracies to `decimals` places.

    `base` is polymask's name for the network of the paper's own rows. On ImageNet-to-Sketch all
    rows have it; on the decathlon other papers' rows have other networks of about the same size.
    """

    name: str
    benchmark: str
    base: str
    decimals: int
    rows: dict[str, PublishedRow]  # by system
    reference: dict[str, float] | None  # the individual networks' accuracies

    def recompute(self, system: str) -> Score:
        """The score that the printed accuracies give, with the interval of their rounding."""
        row = self.rows[system]
        return score(
            self.benchmark,
            row.accuracy,
            reference=self.reference,
            params=row.params,
            decimals=self.decimals,
            reference_decimals=self.decimals,
        )


@dataclass(frozen=True)
class AblationRow:
    """One row of a table of ablations: which of k0 … k3 are fixed, to what, and which learned."""

    method: str
    label: str
    k: tuple[float | Literal["learned"], ...]
    accuracy: dict[str, float]


@dataclass(frozen=True)
class PreciseRow:
    """A decathlon row that is known to two decimals.

    `provenance` is "read" (in a results table of a public repository) or "recalled" (from the cited
    paper, and not read again: rely on it only as far as its score agrees).
    """

    label: str
    method: str | None
    accuracy: dict[str, float]
    score: int
    provenance: Literal["read", "recalled"]


@dataclass(frozen=True)
class Disagreement:
    """A printed number outside the interval that the printed accuracies allow."""

    table: str
    system: str
    cell: Literal["score", "score_per_param"]
    printed: int
    recomputed: float
    low: float
    high: float


@cache
def published_tables() -> dict[str, PublishedTable]:
    """The paper's tables of results: resnet50, densenet121, vgg16 and decathlon."""
    return {content["name"]: _table(content) for content in _content()["tables"]}


def published_table(name: str) -> PublishedTable:
    """The table of this name."""
    tables = published_tables()
    if name not in tables:
        raise BenchmarkError(f"the paper has no table {name!r}; {near_matches(name, tables)}")
    return tables[name]


@cache
def published_ablations() -> dict[str, tuple[AblationRow, ...]]:
    """The paper's two tables of ablations, on resnet50 and densenet121, without ImageNet."""
    return {
        content["name"]: tuple(
            AblationRow(
                row["method"],
                row["label"],
                tuple(row["k"]),
                dict(zip(content["domains"], row["accuracy"], strict=True)),
            )
            for row in content["rows"]
        )
        for content in _content()["ablations"]
    }


@cache
def precise_rows() -> tuple[PreciseRow, ...]:
    """The decathlon rows that are known to two decimals."""
    content = _content()["two_decimals"]
    return tuple(
        PreciseRow(
            row["label"],
            row["method"],
            dict(zip(content["domains"], row["accuracy"], strict=True)),
            row["score"],
            row["provenance"],
        )
        for row in content["rows"]
    )


def disagreements() -> list[Disagreement]:
    """Every printed score, and score per parameter, that its row's accuracies do not allow."""
    found = []
    for table in published_tables().values():
        for system, row in table.rows.items():
            whole = table.recompute(system)
            cells: tuple[tuple[Literal["score", "score_per_param"], int, float], ...] = (
                ("score", row.score, 1.0),
                ("score_per_param", row.score_per_param, row.params),
            )
            for cell, printed, over in cells:
                low, high = whole.low / over, whole.high / over
                if not low - 0.5 <= printed <= high + 0.5:  # printed without decimals
                    recomputed = whole.score / over
                    found.append(Disagreement(table.name, system, cell, printed, recomputed, low, high))
    return found


def _table(content: dict[str, Any]) -> PublishedTable:
    domains = content["domains"]
    rows = {
        row["system"]: PublishedRow(**row | {"accuracy": dict(zip(domains, row["accuracy"], strict=True))})
        for row in content["rows"]
    }
    reference = content["reference"]
    return PublishedTable(
        content["name"],
        content["benchmark"],
        content["base"],
        content["decimals"],
        rows,
        rows[reference].accuracy if reference else None,
    )


@cache
def _content() -> dict[str, Any]:
    text = files("polymask.benchmarks").joinpath("published.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


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
