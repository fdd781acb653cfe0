"""Accuracy against bits: the figure of a benchmark's report, of all methods that it has run, for the docs.

python benchmarks/bits_figure.py results/sketch-mini-64 docs/assets/bits-sketch.svg
python benchmarks/bits_figure.py results/decathlon-mini-32 docs/assets/bits-decathlon.svg
"""

import sys
from pathlib import Path

from polymask.benchmarks.compare import find_frontier
from polymask.benchmarks.records import read_runs
from polymask.benchmarks.tables import tabulate
from polymask.report.figures import size_against_score

runs, target = map(Path, sys.argv[1:])
target.write_text(size_against_score(find_frontier(tabulate(read_runs(runs))), name=target.stem))
