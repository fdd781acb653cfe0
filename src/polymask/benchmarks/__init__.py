"""The two benchmarks: their score, the decathlon's submissions, and what others published."""

from polymask.benchmarks.accuracies import read_accuracies
from polymask.benchmarks.domains import BENCHMARKS, Benchmark, get_benchmark
from polymask.benchmarks.labels import read_labels
from polymask.benchmarks.published import (
    disagreements,
    precise_rows,
    published_ablations,
    published_table,
    published_tables,
)
from polymask.benchmarks.score import Score, score
from polymask.benchmarks.submission import score_submission, write_submission

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Score",
    "disagreements",
    "get_benchmark",
    "precise_rows",
    "published_ablations",
    "published_table",
    "published_tables",
    "read_accuracies",
    "read_labels",
    "score",
    "score_submission",
    "write_submission",
]
