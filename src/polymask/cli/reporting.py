"""The verb that makes tables and figures of a benchmark's runs. It needs no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from polymask.cli.verb import Verb, table

if TYPE_CHECKING:
    from rich.console import Console

_OTHER_COLUMNS = 50  # characters of a line that do not belong to domains


@dataclass(kw_only=True)
class Report(Verb):
    """Write tables and figures of a benchmark's runs, as HTML, Markdown and CSV."""

    runs: tyro.conf.Positional[Path]
    """The folder that `polymask benchmark --out` wrote."""
    out: Path | None = None
    """Where the report goes: beside the runs, unless given."""

    def run(self) -> dict[str, Any]:
        from polymask.report.benchmark import write_report

        findings, files = write_report(self.runs, self.out)
        return findings.to_json() | {"files": [str(file) for file in files]}

    def present(self, result: dict[str, Any], console: "Console") -> None:
        columns = {name: name for name in result["rows"][0]["accuracy"]}
        if sum(len(name) + 2 for name in columns) > console.width - _OTHER_COLUMNS:
            columns = {"mean": "mean over domains"}
        rows = [
            [
                row["label"],
                _number(row["params"], 2),
                *(_number(_accuracy(row, column), 1) for column in columns),
                _number(row["score"], 0),
                _number(row["score_per_param"], 0),
            ]
            for row in result["rows"]
        ]
        headings = ("test accuracy, %", "#Params", *columns.values(), "Score", "Score / #Params")
        console.print(table(*headings, rows=rows))
        console.print(result["remark"], style="dim", markup=False)
        for text in result["missing"]:
            console.print(f"missing: {text}", style="dim", markup=False)
        for file in result["files"]:
            console.print(f"wrote {file}", soft_wrap=True, markup=False)


def _number(value: float | None, places: int) -> str:
    return "–" if value is None else f"{value:.{places}f}"


def _accuracy(row: dict[str, Any], column: str) -> float | None:
    one = row["accuracy"].get(column)
    mean: float | None = row["mean"] if column not in row["accuracy"] else one and one["mean"]
    return mean
