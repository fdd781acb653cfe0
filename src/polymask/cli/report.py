"""The verb that makes tables and figures of a benchmark's runs. It needs no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from polymask.cli.verb import Verb, table
from polymask.errors import BenchmarkError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True)
class Report(Verb):
    """Write tables and figures of a benchmark's runs, as HTML, Markdown and CSV."""

    runs: tyro.conf.Positional[list[Path]]
    """The folder that `polymask benchmark --out` wrote; several only with --compare."""
    out: Path | None = None
    """Where the report goes: beside the runs, unless given."""
    compare: str | None = None
    """Write nothing, but say who is ahead: affine-full,finetune; the first with each of the others,
    over the domains of all folders."""

    def run(self) -> dict[str, Any]:
        if self.compare is not None:
            return self._compare(self.compare)
        if len(self.runs) != 1:
            raise BenchmarkError(
                f"a report is of one folder, not of {len(self.runs)}; give one, or --compare A,B "
                "to compare methods over several"
            )
        from polymask.report.benchmark_files import write_report

        findings, files = write_report(self.runs[0], self.out)
        return findings.to_json() | {"files": [str(file) for file in files]}

    def _compare(self, text: str) -> dict[str, Any]:
        from polymask.benchmarks.compare import compare_pooled

        method, *others = [name.strip() for name in text.split(",")]
        if not self.runs or not others or not all((method, *others)):
            raise BenchmarkError(
                f"--compare {text}: give a folder of runs and two methods or more, with commas between"
            )
        found = [compare_pooled(self.runs, method, other) for other in others]
        return {"comparisons": [one.to_json() for one in found]}

    def present(self, result: dict[str, Any], console: "Console") -> None:
        if "comparisons" in result and "rows" not in result:
            for one in result["comparisons"]:
                console.print(one["sentence"], soft_wrap=True, markup=False)
            return
        rows = result["rows"]
        before = {
            "test accuracy, %": [row["label"] for row in rows],
            "#Params": [_number(row["params"], 2) for row in rows],
        }
        after = _after(rows)
        accuracies = {name: [_over_seeds(row["accuracy"][name]) for row in rows] for name in rows[0]["accuracy"]}
        others = sum(map(_width, (before | after).items()))
        if others + sum(map(_width, accuracies.items())) > console.width:
            accuracies = {"mean over domains": [_over_seeds(_mean(row)) for row in rows]}
        columns = before | accuracies | after
        lines = [list(line) for line in zip(*columns.values(), strict=True)]
        console.print(table(*columns, rows=lines))
        for row in rows:
            if row["remark"]:
                console.print(f"{row['label']}: {row['remark']}", markup=False)
        console.print(result["remark"], style="dim", markup=False)
        for text in result["missing"]:
            console.print(f"missing: {text}", style="dim", markup=False)
        for file in result["files"]:
            console.print(f"wrote {file}", soft_wrap=True, markup=False)


def _number(value: float | None, places: int) -> str:
    return "–" if value is None else f"{value:.{places}f}"


def _over_seeds(one: dict[str, Any] | None) -> str:
    if one is None:
        return "–"
    return f"{one['mean']:.1f}" if one["sd"] is None else f"{one['mean']:.1f} ± {one['sd']:.1f}"


def _mean(row: dict[str, Any]) -> dict[str, Any] | None:
    if row["mean"] is None:
        return None
    by_seed = row["mean_by_seed"]
    return {"mean": row["mean"], "sd": None if by_seed is None else by_seed["sd"]}


def _after(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Scores, bits that moved and what was chosen; the last two where a row has them."""
    from polymask.benchmarks.training import settings_text
    from polymask.report.wording import moved_text

    shares = [row["share_moved"] for row in rows]
    scored = {
        "Score": [_number(row["score"], 0) for row in rows],
        "Score / #Params": [_number(row["score_per_param"], 0) for row in rows],
    }
    some = {
        "bits moved": ["–" if share is None else moved_text(share) for share in shares],
        "chosen": [settings_text(row["chosen"]) or "–" for row in rows],
    }
    return scored | {name: cells for name, cells in some.items() if set(cells) != {"–"}}


def _width(column: tuple[str, list[str]]) -> int:
    heading, cells = column
    return 2 + max(map(len, (heading, *cells)))
