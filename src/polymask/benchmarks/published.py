"""What the paper and its rivals printed: tables as data, what they come to when recomputed, and beside a table of runs.

The paper is Mancini et al., arXiv 2103.13894. Its numbers are in published.json as they are printed, right or wrong;
`disagreements` finds those that its own accuracies do not allow.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from polymask.benchmarks.score import Score, score
from polymask.benchmarks.suites import BENCHMARKS, DECATHLON, IMAGENET_TO_SKETCH, Benchmark, canonical
from polymask.benchmarks.tables import ResultRow, ResultTable
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

    `base` is polymask's name for the network of the paper's own rows. On ImageNet-to-Sketch all rows have it; on the
    decathlon other papers' rows have other networks of about the same size.
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
        rounded = {"decimals": self.decimals, "reference_decimals": self.decimals}
        return score(self.benchmark, row.accuracy, reference=self.reference, params=row.params, **rounded)


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

    `provenance` is "read" (in a results table of a public repository) or "recalled" (from the cited paper, and not
    checked: rely on it only as far as its score agrees).
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
    cell: str  # score or score_per_param
    printed: int
    recomputed: float
    low: float
    high: float


@cache
def published_tables() -> dict[str, PublishedTable]:
    """The paper's tables of results: resnet50, densenet121, vgg16 and decathlon."""
    found = {}
    for content in _content()["tables"]:
        rows = {row["system"]: PublishedRow(**row) for row in _rows(content)}
        reference = rows[content["reference"]].accuracy if content["reference"] else None
        kept = {name: content[name] for name in ("name", "benchmark", "base", "decimals")}
        found[content["name"]] = PublishedTable(**kept, rows=rows, reference=reference)
    return found


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
        content["name"]: tuple(AblationRow(**row | {"k": tuple(row["k"])}) for row in _rows(content))
        for content in _content()["ablations"]
    }


@cache
def precise_rows() -> tuple[PreciseRow, ...]:
    """The decathlon rows that are known to two decimals."""
    return tuple(PreciseRow(**row) for row in _rows(_content()["two_decimals"]))


@cache
def _content() -> dict[str, Any]:
    text = files("polymask.benchmarks").joinpath("published.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def _rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    """A table's rows, their accuracies by domain."""
    domains = content["domains"]
    return [row | {"accuracy": dict(zip(domains, row["accuracy"], strict=True))} for row in content["rows"]]


def disagreements() -> list[Disagreement]:
    """Every printed score, and score per parameter, that its row's accuracies do not allow."""
    found = []
    for table in published_tables().values():
        for system, row in table.rows.items():
            whole = table.recompute(system)
            cells = {"score": (row.score, 1.0), "score_per_param": (row.score_per_param, row.params)}
            for cell, (printed, over) in cells.items():
                low, high = whole.low / over, whole.high / over
                if not low - 0.5 <= printed <= high + 0.5:  # printed without decimals
                    recomputed = whole.score / over
                    found.append(Disagreement(table.name, system, cell, printed, recomputed, low, high))
    return found


LEAST_ABLATIONS = 3  # methods of the ablation that runs must have before it is a table


@dataclass(frozen=True)
class PublishedMatch:
    """The published table that goes with a table of runs.

    `shared` gives the runs' name of each published domain that they have. `shared_scores` are the published systems'
    scores over those alone, where they are not all.
    """

    table: PublishedTable
    same_base: bool
    remark: str
    shared: Mapping[str, str]
    shared_scores: Mapping[str, float]
    misprints: Mapping[tuple[str, str], float]  # (system, cell) -> what it should be

    def to_json(self) -> dict[str, Any]:
        scores, rows = self.shared_scores, self.table.rows
        return {
            "table": self.table.name,
            "base": self.table.base,
            "same_base": self.same_base,
            "shared": dict(self.shared),
            "rows": [asdict(row) | {"shared_score": scores.get(system)} for system, row in rows.items()],
        }


@dataclass(frozen=True)
class Ablation:
    """One row of the ablation: k0 … k3, our row if it was run, and what the paper has."""

    method: str
    label: str
    k: tuple[float | Literal["learned"], ...]
    row: ResultRow | None
    published: Mapping[str, Mapping[str, float]]  # by table, then by our name of the domain


def find_published(table: ResultTable) -> PublishedMatch | None:
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
    ours = {canonical(benchmark, column): column for column in table.columns}
    shared = {domain: ours[domain] for domain in benchmark.domains if domain in ours}
    misprints = {(d.system, d.cell): d.recomputed for d in disagreements() if d.table == chosen.name}
    return PublishedMatch(chosen, bool(same), f"{remark}.", shared, _shared_scores(chosen, shared), misprints)


def _shared_scores(table: PublishedTable, shared: Mapping[str, str]) -> dict[str, float]:
    benchmark = BENCHMARKS[table.benchmark]
    reference = benchmark.reference or table.reference
    if not shared or len(shared) == len(benchmark.domains) or reference is None:
        return {}
    part = Benchmark(table.benchmark, dict.fromkeys(shared, ()))
    theirs = {domain: reference[domain] for domain in shared}
    return {
        system: score(part, {domain: row.accuracy[domain] for domain in shared}, reference=theirs).score
        for system, row in table.rows.items()
    }


def find_ablations(table: ResultTable) -> tuple[Ablation, ...]:
    """The ablation's twelve rows; none where the runs have less than three of its methods."""
    tables = published_ablations()
    rows = next(iter(tables.values()))
    done = [table.row(row.method) for row in rows]
    if sum(row is not None and bool(row.outcomes) for row in done) < LEAST_ABLATIONS:
        return ()
    names = {domain: canonical(IMAGENET_TO_SKETCH, domain) for domain in table.plan.domains}
    found = []
    for place, row in enumerate(rows):
        printed = {name: rows[place].accuracy for name, rows in tables.items()}
        published = {
            name: {ours: accuracy[domain] for ours, domain in names.items() if domain in accuracy}
            for name, accuracy in printed.items()
        }
        found.append(Ablation(row.method, row.label, row.k, done[place], published))
    return tuple(found)
