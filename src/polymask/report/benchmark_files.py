"""A benchmark's report as files: report.html, report.md and results.csv."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from polymask.benchmarks.findings import Findings, find
from polymask.benchmarks.movement import movement
from polymask.benchmarks.records import read_runs
from polymask.benchmarks.tables import ResultTable, Row
from polymask.benchmarks.training import chosen_of, protocol_of, settings_text
from polymask.errors import BenchmarkError
from polymask.pack.format import write_atomically
from polymask.report.benchmark_page import benchmark_page
from polymask.report.benchmark_text import benchmark_markdown

PAGE, MARKDOWN, CSV = "report.html", "report.md", "results.csv"


def write_report(runs: str | Path, out: str | Path | None = None) -> tuple[Findings, list[Path]]:
    """Write the three files, each whole or not at all, into `out`, or beside the runs.

    What comes back is what they say, and where they are.
    """
    findings = find(read_runs(runs))
    folder = Path(runs if out is None else out)
    contents = {  # all are made before any is written
        PAGE: benchmark_page(findings),
        MARKDOWN: benchmark_markdown(findings),
        CSV: results_csv(findings.table),
    }
    encoded = {name: text.encode() for name, text in contents.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchmarkError(f"{folder} cannot be made: {error.strerror}; give --out") from error
    for name, data in encoded.items():
        write_atomically(folder / name, data)
    return findings, [folder / name for name in encoded]


def results_csv(table: ResultTable) -> str:
    """One line for each method, direction and domain; empty where nothing is known."""
    file = io.StringIO()
    lines = [_line(table, row, column) for row in table.rows for column in table.columns]
    writer = csv.DictWriter(file, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _line(table: ResultTable, row: Row, column: str) -> dict[str, Any]:
    plan, accuracy = table.plan, row.accuracy[column]
    found = list(row.found_on(column).values())
    points = None if row.score is None else _points(table, row, column)
    moved = movement(found)
    return {
        "benchmark": plan.benchmark,
        "base": plan.base,
        "method": row.method,
        "direction": row.direction,
        "domain": column,
        "base_own_domain": "yes" if column == table.own else "no",
        "accuracy_mean": None if accuracy is None else accuracy.mean,
        "accuracy_sd": None if accuracy is None else accuracy.sd,
        "seeds": 0 if accuracy is None else accuracy.n,
        "seeds_planned": len(plan.seeds),
        "learned_mean": _mean(one.learned for one in found),
        "val_mean": _mean(one.val_accuracy for one in found),
        "mean_all_domains": row.mean,
        "mean_all_domains_sd": None if row.mean_by_seed is None else row.mean_by_seed.sd,
        "bits_flipped": None if moved is None else moved.flipped,
        "bits_masked": None if moved is None else moved.masked,
        "share_moved": None if moved is None else moved.share,
        "masks_moved": None if moved is None else "no" if moved.is_still else "yes",
        "chosen": settings_text(chosen_of(plan, row.method)),
        "protocol": settings_text(protocol_of(plan, row)),
        "points": points,
        "pack_bytes": _mean(one.pack_bytes for one in found),
        "bits_per_weight": _mean(one.bits_per_weight for one in found),
        "params": row.params,
        "params_stored": row.params_stored,
        "score": None if row.score is None else row.score.score,
        "score_by_seed_mean": None if row.score_by_seed is None else row.score_by_seed.mean,
        "score_by_seed_sd": None if row.score_by_seed is None else row.score_by_seed.sd,
        "score_per_param": row.score_per_param,
        "seconds_all_domains": row.seconds,
    }


def _points(table: ResultTable, row: Row, column: str) -> float:
    """What a column gives to the score, whatever the benchmark calls it."""
    assert row.score is not None
    assert table.reference.benchmark is not None
    return row.score.per_domain[table.reference.benchmark.find(column)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
