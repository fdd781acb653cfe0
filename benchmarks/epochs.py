"""How often should few images be seen? The default method and fine-tuning with more and more epochs, on val.

    python benchmarks/epochs.py --data ../shared/data --part 0/2 --out results/epochs.json    # with 1/2 beside it
    python benchmarks/epochs.py --table --out results/epochs.json

At most 500 training images of each domain, by the recipe `standard` on EfficientNet-Lite0 at 64 pixels, measured at the
size of training and without the last head, so that val says what was reached. A seed draws the crops, the order and
where training begins. Test images are not read. A finished run is kept and skipped when it is started again.
"""

import argparse
from dataclasses import replace
from itertools import product
from math import ceil
from statistics import fmean
from typing import Any

import torch
from kept import domain_options, mean, measure_and_print, missing, write

import polymask as pm
from polymask.data.load import load_data
from polymask.train.recipe import read_method

DOMAINS = {
    "solar-cells": "solar-cells",
    "letters": "letters",
    "dtd": "decathlon:{data}/decathlon-mini/dtd",
    "gtsrb": "decathlon:{data}/decathlon-mini/gtsrb",
    "flowers": "sketch:{data}/sketch-mini/flowers",
}


def main() -> None:
    parser = domain_options(__doc__, DOMAINS, ["affine-centred", "finetune"], 500)
    parser.add_argument("--epochs", type=int, nargs="+", default=[6, 12, 24])
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--side", type=int, default=64, help="of images, in training and on val")
    measure_and_print(parser, measure, table)


def measure(options: argparse.Namespace) -> None:
    """All runs of this process's part that are not in the file yet, each written as soon as it is done."""
    torch.set_num_threads(1)
    base = pm.load_base("efficientnet-lite0")
    asked = product(options.seeds, options.domains, options.epochs, options.methods)
    runs = {
        f"{domain} {method} {epochs} {seed}": (domain, method, epochs, seed) for seed, domain, epochs, method in asked
    }
    for key, (domain, method, epochs, seed) in missing(runs, options):
        data = load_data(DOMAINS[domain].format(data=options.data), seed=0, limit=options.limit)
        text = read_method(method)
        recipe = pm.get_recipe("standard", epochs=epochs, side=options.side, test_side=None, refit_on_val=None)
        if text.name == "finetune":
            recipe = replace(recipe, rate=recipe.weight_rate)
        recipe = text.recipe(recipe)
        learned = pm.learn(base, replace(data, test=None), text.method(recipe), recipe, seed=seed, progress=False)
        row = {"domain": domain, "method": method, "epochs": epochs, "seed": seed}
        row |= {"train": len(data.train), "images": len(data.val)}
        row |= {"steps": epochs * ceil(len(data.train) / recipe.batch_size)}
        write(options.out, {key: row | {"val": learned.domain.metrics["val_accuracy"]}})
        print(key, learned.domain.metrics["val_accuracy"], flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each method and number of epochs: val by domain over seeds, and the mean if no domain lacks it."""
    domains = [domain for domain in DOMAINS if any(row["domain"] == domain for row in rows)]
    heads = ["method", "epochs", "steps", *domains, "mean"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for method, epochs in sorted({(row["method"], row["epochs"]) for row in rows}):
        mine = [row for row in rows if (row["method"], row["epochs"]) == (method, epochs)]
        found = {name: [row["val"] for row in mine if row["domain"] == name] for name in domains}
        steps = sorted({row["steps"] for row in mine})
        said = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
        whole = mean(fmean(values) for values in found.values()) if all(found.values()) else "–"
        cells = [mean(found[name]) for name in domains]
        lines.append(f"| `{method}` | {epochs} | {said} | " + " | ".join(cells) + f" | **{whole}** |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
