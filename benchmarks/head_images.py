"""Which images the last head is best fitted to: those of training, also those of val, also random crops of either.

    python benchmarks/head_images.py --data ../shared/data --out results/head-images.json    # goes on if cut
    python benchmarks/head_images.py --table --out results/head-images.json

Each domain is learned once by the recipe `standard`, without its last steps, on EfficientNet-Lite0, and a head is
fitted to what it makes of images of 4/3 of the side of training; and to what the frozen base makes of them. To compare
on images that no head was fitted to and no penalty was chosen on, val is cut into quarters: each in turn is measured,
and the other three are val to choose the penalty on, and to be fitted to in the end. At most 1,000 images of test are
measured beside it by heads that had all of val; they decide nothing.
"""

import argparse
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from kept import domain_options, mean, measure_and_print, missing, write
from test_sizes import DOMAINS, TESTED

import polymask as pm
from polymask.core.domain import Domain
from polymask.data.cache import cache_splits, shrink_of
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.data.loader import Loader, loader_at
from polymask.data.preprocess import train_transform
from polymask.data.split import SubsetSplit
from polymask.train.recipe import read_method
from polymask.train.regression import STRENGTHS, Seen, fit_features, gathered, right_ones

QUARTERS = 4
FACTOR, STEP = 4 / 3, 8
WAYS = ("train", "train and val", "crops of train", "crops of train, and val", "crops of both")
Row = dict[str, Any]


def main() -> None:
    parser = domain_options(__doc__, DOMAINS, ["classifier-only", "affine-centred"], 1024)
    parser.add_argument("--side", type=int, default=64, help="of training")
    measure_and_print(parser, measure, table)


def measure(options: argparse.Namespace) -> None:
    """All runs of this process's part that are not in the file yet, each written as soon as it is done."""
    torch.set_num_threads(1)
    base = pm.load_base("efficientnet-lite0")
    asked = product(options.domains, options.methods)
    runs = {f"{domain} {method} {options.side}": (method, domain) for domain, method in asked}
    for key, (method, domain) in missing(runs, options):
        data = load_data(DOMAINS[domain].format(data=options.data), seed=0, limit=options.limit)
        row = {"domain": domain, "method": method, "side": options.side, "limit": options.limit}
        row |= one_run(base, data, method, options.side)
        write(options.out, {key: row})
        print(row, flush=True)


def one_run(base: pm.Base, data: DomainData, method: str, side: int) -> Row:
    """Quarters of val, and test, by each way."""
    assert data.test is not None
    some = np.sort(np.random.default_rng(0).permutation(len(data.test))[:TESTED])
    domain = learned(base, replace(data, test=None), method, side)
    spec = domain.input.at(STEP * round(FACTOR * side / STEP))
    parts = {"train": data.train, "val": data.val, "test": SubsetSplit(data.test, some)}
    seen = {part: gathered(base, domain, loader_at(split, spec).batches()) for part, split in parts.items()}
    cropped = train_transform(data, spec, scale=pm.get_recipe("standard").random_scale)
    for part in ("train", "val"):
        caches = cache_splits([parts[part]], shrink_of(spec))
        loader = Loader(caches[0], cropped, batch_size=64)
        seen[f"crops of {part}"] = gathered(base, domain, loader.batches())
    order = torch.randperm(len(data.val), generator=torch.Generator().manual_seed(0))
    found: dict[str, Row] = {way: {} for way in WAYS}
    for way in WAYS:
        right = []
        for quarter in range(QUARTERS):
            out = order[quarter::QUARTERS]
            rest = torch.cat([order[other::QUARTERS] for other in range(QUARTERS) if other != quarter])
            fit(domain, seen, way, rest)
            right.append(right_ones(domain.head, part_of_seen(seen["val"], out)))
        found[way]["val"] = round(100 * float(torch.cat(right).float().mean()), 2)
        fit(domain, seen, way, order)
        found[way]["test"] = round(100 * float(right_ones(domain.head, seen["test"]).float().mean()), 2)
    return {"val": len(data.val), "test": len(some), "train": len(data.train), "found": found}


def learned(base: pm.Base, data: DomainData, method: str, side: int) -> Domain:
    recipe = pm.get_recipe("standard", side=side, epochs=6, refit=None, test_side=None, precision=32)
    if method == "classifier-only":
        recipe = replace(recipe, epochs=1)
    text = read_method(method)
    return pm.learn(base, data, text.method(recipe), text.recipe(recipe), progress=False).domain


def part_of_seen(seen: Seen, places: torch.Tensor) -> Seen:
    return Seen(seen.features[places], seen.labels[places])


def fit(domain: Domain, seen: dict[str, Seen], way: str, val: torch.Tensor) -> None:
    """Choose the penalty with these images of val, and fit a head to what the way says, with that penalty."""
    held_out = part_of_seen(seen["val"], val)
    train = [seen["train"]] + ([seen["crops of train"]] if "crops" in way else [])
    strength = fit_features(domain, together(train), held_out, STRENGTHS).strength
    more = train + ([held_out] if way.endswith("val") or "both" in way else [])
    more += [part_of_seen(seen["crops of val"], val)] if "both" in way else []
    if len(more) > len(train):
        fit_features(domain, together(more), None, [s for s in STRENGTHS if s >= strength])


def together(parts: list[Seen]) -> Seen:
    return Seen(torch.cat([part.features for part in parts]), torch.cat([part.labels for part in parts]))


def table(rows: list[Row]) -> str:
    """A row for each method and way: quarters of val / test by domain and in the mean."""
    domains = [domain for domain in DOMAINS if any(row["domain"] == domain for row in rows)]
    lines = [
        "| features of | head fitted to | " + " | ".join([*domains, "mean"]) + " |",
        "|" + "---|" * (len(domains) + 3),
    ]
    for method in dict.fromkeys(row["method"] for row in rows):
        by_domain = {row["domain"]: row["found"] for row in rows if row["method"] == method}
        for way in WAYS:
            mine = [by_domain.get(domain, {}).get(way) for domain in domains]
            cells = ["–" if one is None else f"{one['val']:.1f} / {one['test']:.1f}" for one in mine]
            both = (mean(one[part] for one in mine if one) for part in ("val", "test"))
            lines.append(f"| {method} | {way} | " + " | ".join(cells) + " | **" + " / ".join(both) + "** |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
