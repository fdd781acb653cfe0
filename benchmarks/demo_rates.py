"""Are the demo's rates right for its domains? Three rates a method, on val, with other seeds than those that are shown.

    python benchmarks/demo_rates.py --part 0/2 --out results/demo-rates.json    # ten minutes, with 1/2 beside it
    python benchmarks/demo_rates.py --table --out results/demo-rates.json

Images, epochs and sizes are those of `polymask demo`; all is measured at the size of training and without the last
head. Test images are not read. A finished run is kept and skipped when it is started again.
"""

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from kept import add_part, part_of, read, write

import polymask as pm
from polymask.cli.demo import DOMAINS, METHOD
from polymask.data.load import load_data

RATES = {"finetune": (1e-4, 3e-4, 1e-3), METHOD: (3e-4, 1e-3, 3e-3)}
TRIES = [(method, rate) for method, rates in RATES.items() for rate in rates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="3,4")
    add_part(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print what was measured before")
    options = parser.parse_args()
    if not options.table:
        measure(options)
    print_table(list(read(options.out).values()))


def measure(options: argparse.Namespace) -> None:
    """Accuracy on val of every domain, method and rate, each kept as soon as it is done."""
    torch.set_num_threads(1)
    base = pm.load_base("efficientnet-lite0")
    for seed, shown, (method, rate) in part_of(list(product(options.seeds.split(","), DOMAINS, TRIES)), options.part):
        key = f"{shown.source} {method} {rate:g} {seed}"
        if key in read(options.out):
            continue
        data = replace(load_data(shown.source, seed=int(seed), limit=shown.images), test=None)
        changes = {"epochs": shown.epochs, "side": shown.side, "rate": rate}
        recipe = pm.get_recipe("standard", **changes, test_side=None, refit_on_val=None)
        found = pm.learn(base, data, method, recipe, seed=int(seed), progress=False).domain.metrics
        row = {"domain": shown.source, "method": method, "rate": rate, "seed": int(seed)}
        write(options.out, {key: row | {"val": found["val_accuracy"], "images": len(data.val)}})
        print(key, found["val_accuracy"], flush=True)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Means over seeds of those that are done."""
    names = [shown.source for shown in DOMAINS]
    print(f"| method | rate | {' | '.join(names)} | mean |\n|---|---{'|---' * len(names)}|---|")
    for method, rate in TRIES:
        its = [[r["val"] for r in rows if (r["domain"], r["method"], r["rate"]) == (n, method, rate)] for n in names]
        if all(its):
            means = list(map(fmean, its))
            print(f"| {method} | {rate:g} | {' | '.join(f'{value:.1f}' for value in [*means, fmean(means)])} |")


if __name__ == "__main__":
    main()
