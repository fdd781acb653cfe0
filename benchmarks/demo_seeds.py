"""The demo over several seeds: one seed and some hundred test images cannot tell its methods apart.

    python benchmarks/demo_seeds.py --out results/demo-seeds.json    # five minutes a seed
    python benchmarks/demo_seeds.py --table --out results/demo-seeds.json

A seed draws the splits, the crops and where training begins. All else is as in `polymask demo`, which this runs: the
same images, epochs and sizes for all methods, masks and whole weights each at the rate that `standard` sets.
A finished seed is kept and skipped when it is started again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from kept import read, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print what was measured before")
    options = parser.parse_args()
    if options.table:
        print_table(read(options.out))
        return
    for seed in options.seeds.split(","):
        if seed in read(options.out):
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "polymask", "demo", "--seed", seed, "--out", folder, "--json"]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        if not found["nothing_forgotten"]:
            raise SystemExit(f"seed {seed}: a domain has changed")
        write(options.out, {seed: found["domains"]})
    print_table(read(options.out))


def print_table(rows: dict[str, Any]) -> None:
    """Test accuracy of each method: mean and standard deviation over seeds, and of the mean over domains."""
    first = next(iter(rows.values()))
    methods = list(next(iter(first.values())))
    print(f"| test accuracy, %, seeds {', '.join(sorted(rows, key=int))} | {' | '.join(methods)} |")
    print("|---" * (1 + len(methods)) + "|")
    for domain in first:
        accuracies = {m: [row[domain][m]["test_accuracy"] for row in rows.values()] for m in methods}
        print(f"| {domain} | {' | '.join(spread(accuracies[m]) for m in methods)} |")
    means = {m: [fmean(found[m]["test_accuracy"] for found in row.values()) for row in rows.values()] for m in methods}
    print(f"| mean | {' | '.join(spread(means[m]) for m in methods)} |")


def spread(values: list[float]) -> str:
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
