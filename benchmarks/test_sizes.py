"""What the size at test is worth: one training, measured at several sizes, with three heads at each.

    python benchmarks/test_sizes.py --data ../shared/data --out results/test-sizes.json    # goes on if cut
    python benchmarks/test_sizes.py --table --out results/test-sizes.json

Each domain is learned once by the recipe `standard`, without its last step, on EfficientNet-Lite0. It is then measured
at the side that it was trained at, at 4/3 and at 5/3 of it, with the head that was trained, the one that is fitted
again at the side of training, and the one that is fitted again at the side where it is measured; on val, and on at most
1,000 images of test, which decide nothing. `ahead` counts the images of val that are right so and wrong at the side of
training with the head fitted there, `behind` the reverse.
"""

import argparse
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from kept import domain_options, mean, measure_and_print, missing, write
from torch import Tensor

import polymask as pm
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.data.loader import loader_at
from polymask.data.split import SubsetSplit
from polymask.train.recipe import read_method
from polymask.train.regression import STRENGTHS, Seen, fit_features, gathered
from polymask.train.sizing import STEP

DOMAINS = {
    "flowers": "sketch:{data}/sketch-mini/flowers",
    "dtd": "decathlon:{data}/decathlon-mini/dtd",
    "gtsrb": "decathlon:{data}/decathlon-mini/gtsrb",
    "cubs": "sketch:{data}/sketch-mini/cubs",
    "cars": "sketch:{data}/sketch-mini/cars",
    "cifar100": "decathlon:{data}/decathlon-mini/cifar100",
    "letters": "letters",
    "solar-cells": "solar-cells",
}
FACTORS = (1.0, 4 / 3, 5 / 3)
TESTED = 1000
Row = dict[str, Any]


def main() -> None:
    parser = domain_options(__doc__, DOMAINS, ["affine-centred"], 1024)
    parser.add_argument("--sides", type=int, nargs="+", default=[96], help="of training")
    measure_and_print(parser, measure, table)


def measure(options: argparse.Namespace) -> None:
    """All runs of this process's part that are not in the file yet, each written as soon as it is done."""
    torch.set_num_threads(1)
    base = pm.load_base("efficientnet-lite0")
    asked = product(options.sides, options.methods, options.domains)
    runs = {f"{domain} {method} {side}": (side, method, domain) for side, method, domain in asked}
    for key, (side, method, domain) in missing(runs, options):
        data = load_data(DOMAINS[domain].format(data=options.data), seed=0, limit=options.limit)
        row = {"domain": domain, "method": method, "side": side, "limit": options.limit}
        row |= one_run(base, data, method, side)
        write(options.out, {key: row})
        print(row, flush=True)


def one_run(base: pm.Base, data: DomainData, method: str, side: int) -> Row:
    """Val and test at every side with every head, after one training."""
    assert data.test is not None
    some = np.sort(np.random.default_rng(0).permutation(len(data.test))[:TESTED])
    seen = replace(data, test=None)
    text = read_method(method)
    recipe = text.recipe(pm.get_recipe("standard", side=side, epochs=6, refit=None, test_side=None, precision=32))
    domain = pm.learn(base, seen, text.method(recipe), recipe, progress=False).domain
    head = domain.head
    assert head is not None
    parts = {"train": data.train, "val": data.val, "test": SubsetSplit(data.test, some)}
    heads: dict[str, Row] = {"trained": copy(head)}
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for factor in FACTORS:
        spec = domain.input.at(STEP * round(factor * side / STEP))
        features = {part: gathered(base, domain, loader_at(split, spec).batches()) for part, split in parts.items()}
        fit_features(domain, features["train"], features["val"], STRENGTHS)
        heads["fitted there"] = copy(head)
        if factor == 1:
            heads["fitted"] = copy(head)
        for name, state in heads.items():
            head.load_state_dict(state)
            found[f"{spec.side} {name}"] = {part: right(head, features[part]) for part in ("val", "test")}
    first = found[f"{side} fitted"]["val"]
    return {"val": len(data.val), "test": len(some), "found": {key: told(each, first) for key, each in found.items()}}


def copy(head: torch.nn.Module) -> Row:
    return {name: tensor.clone() for name, tensor in head.state_dict().items()}


@torch.no_grad()
def right(head: torch.nn.Module, seen: Seen) -> Tensor:
    """Of each image, whether it is classified right."""
    found: Tensor = head(seen.features).argmax(1) == seen.labels
    return found


def told(each: dict[str, Tensor], first: Tensor) -> Row:
    """Accuracy on val and test in percent; images of val that are right here and not at first, and the reverse."""
    val = each["val"]
    accuracy = {part: round(100 * float(each[part].float().mean()), 2) for part in ("val", "test")}
    return accuracy | {"ahead": int((val & ~first).sum()), "behind": int((first & ~val).sum())}


def table(rows: list[Row]) -> str:
    """A row for each head and factor: val / test by domain and in the mean."""
    domains = [domain for domain in DOMAINS if any(row["domain"] == domain for row in rows)]
    heads = ["side", "head", *domains, "mean"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for factor in FACTORS:
        for name in ("trained", "fitted", "fitted there"):
            if factor == 1 and name == "fitted there":
                continue
            mine = [
                next(r["found"][f"{STEP * round(factor * r['side'] / STEP)} {name}"] for r in rows if r["domain"] == d)
                for d in domains
            ]
            cells = [f"{one['val']:.1f} / {one['test']:.1f}" for one in mine]
            both = (mean(one[part] for one in mine) for part in ("val", "test"))
            lines.append(f"| {factor:.2f} | {name} | " + " | ".join(cells) + " | **" + " / ".join(both) + "** |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
