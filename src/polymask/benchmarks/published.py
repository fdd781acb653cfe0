"""What the paper and its rivals printed: tables as data, and what they come to when recomputed.

The paper is Mancini et al., arXiv 2103.13894. Its numbers are in published.json as they are
printed, right or wrong; `disagreements` finds those that its own accuracies do not allow.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from polymask.benchmarks.score import Score, score
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
