"""What `polymask learn` should do unless told otherwise: methods, and what is settled after training, by val.

    python benchmarks/defaults.py --data ../shared/data --out results/defaults.json    # goes on if cut
    python benchmarks/defaults.py --table --out results/defaults.json

Each method learns each domain once, by `quick` on EfficientNet-Lite0. What comes after training is then measured on
that one domain in four ways: as it is; with the head fitted again (`--refit auto`); at the best size (`--test-side
auto`); and both. Two methods also have a head that begins at 0 on centred features, as `standard` first had it, and
all have it as `standard` has it now. Val decides within each way, between the ways, between both beginnings of the head
and between methods; test, of at most 1,000 images, is what comes of it and decides nothing. Fine-tuning, at the rate
that its searches chose, is treated the same.
"""

import argparse
from dataclasses import replace
from itertools import product
from statistics import mean
from typing import Any

import numpy as np
import torch
from kept import domain_options, measure_and_print, missing, write

import polymask as pm
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.data.loader import loader_at
from polymask.data.split import SubsetSplit
from polymask.train.learn import make_loaders
from polymask.train.recipe import read_method
from polymask.train.regression import refit_head
from polymask.train.sizing import choose_test_input

DOMAINS = {
    "flowers": "sketch:{data}/sketch-mini/flowers",
    "dtd": "decathlon:{data}/decathlon-mini/dtd",
    "gtsrb": "decathlon:{data}/decathlon-mini/gtsrb",
    "letters": "letters",
}
START = ":head_start=centred:head_rate=5e-4"  # as `standard` had it, without units of features
NOW = ":head_start=centred:head_rate=2e-4"  # as it has it
METHODS = (
    *("affine-full", "affine-centred:rate=5e-4", "affine-centred:rate=1e-3", "finetune:rate=3e-4"),
    *("affine-full" + START, "finetune:rate=3e-4" + START),
    *("affine-full" + NOW, "affine-full:rate=1e-3" + NOW, "affine-centred:rate=1e-3" + NOW, "finetune:rate=3e-4" + NOW),
)
WAYS = {"as it is": (False, False), "size": (False, True), "refit": (True, False), "both": (True, True)}  # in turn
TESTED = 1000
RECIPE = pm.get_recipe("quick", precision=32)


def main() -> None:
    parser = domain_options(__doc__, DOMAINS, list(METHODS), 2048)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    measure_and_print(parser, measure, table)


def measure(options: argparse.Namespace) -> None:
    """All runs that are not in the file yet, each written as soon as it is done."""
    torch.set_num_threads(1)
    base = pm.load_base("efficientnet-lite0")
    wanted = product(options.seeds, options.domains, options.methods)
    runs = {f"{domain} {method} {seed}": (seed, domain, method) for seed, domain, method in wanted}
    for key, (seed, domain, method) in missing(runs, options):
        data = load_data(DOMAINS[domain].format(data=options.data), seed=seed, limit=options.limit)
        row = {"method": method, "domain": domain, "seed": seed} | one_run(base, data, method, seed)
        write(options.out, {key: row})
        print(row, flush=True)


def one_run(base: pm.Base, data: DomainData, method: str, seed: int) -> dict[str, Any]:
    """Val and test of the four ways, after one training."""
    assert data.test is not None
    some = np.random.default_rng(seed).permutation(len(data.test))[:TESTED]
    test, seen = SubsetSplit(data.test, np.sort(some)), replace(data, test=None)
    text = read_method(method)
    recipe = text.recipe(RECIPE)
    loaders = make_loaders(seen, base.input, recipe, seed=seed)
    domain = pm.learn(base, seen, text.method(recipe), recipe, loaders=loaders, seed=seed, progress=False).domain
    found: dict[str, Any] = {"bits": round(domain.metrics["bits_per_weight"], 3)}
    trained, fitted = domain.input, False
    for way, (refit, size) in WAYS.items():
        domain.input = trained
        if refit and not fitted:
            refit_head(base, domain, loaders.train, loaders.val, "auto")
            fitted = True
        if size:
            # With the head as it is: these tables are older than heads that are fitted for each size.
            sized = replace(recipe, test_side="auto", refit=None)
            domain.input = choose_test_input(base, domain, seen, sized).input
        on_val, on_test = (pm.evaluate(base, domain, loader_at(part, domain.input)) for part in (data.val, test))
        found[way] = {"val": round(on_val, 2), "test": round(on_test, 2), "side": domain.input.side}
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The four ways with a head that begins at random numbers; both beginnings, with the head fitted again; today's."""
    drawn = [row for row in rows if "head_start" not in row["method"]]
    begun = {row["method"].split(START)[0] for row in rows if row["method"].endswith(START)}
    pairs = [row for row in rows if row["method"].split(START)[0] in begun]
    today = [row for row in rows if row["method"].endswith(NOW)]
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    methods = {row["method"] for row in drawn}
    shared = [d for d in domains if all(any((r["method"], r["domain"]) == (m, d) for r in drawn) for m in methods)]
    ways = lines("after training", drawn, shared, {way: way for way in WAYS})
    heads = lines("head begins", pairs, domains, {"refit": None})
    return f"{ways}\n\n{heads}" + ("\n\n" + lines("head begins", today, domains, {"refit": None}) if today else "")


def lines(heading: str, rows: list[dict[str, Any]], domains: list[str], ways: dict[str, str | None]) -> str:
    """A row for each method and way: val, and test, by domain and in the mean where all are there."""
    heads = ["method", heading, *domains, "mean", "seeds"]
    found = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for method in sorted({row["method"] for row in rows}, key=lambda text: text.partition(":head_start")[:2]):
        mine = [row for row in rows if row["method"] == method]
        for way, said in ways.items():
            each = [
                [mean(values) for values in zip(*((r[way]["val"], r[way]["test"]) for r in here), strict=True)]
                for here in ([row for row in mine if row["domain"] == domain] for domain in domains)
            ]
            cells = [f"{pair[0]:.1f} / {pair[1]:.1f}" if pair else "–" for pair in each]
            whole = [mean(pair[place] for pair in each) for place in (0, 1)] if all(each) else []
            total = f"**{whole[0]:.1f} / {whole[1]:.1f}**" if whole else "–"
            name, begins, _ = method.partition(":head_start")
            seeds, said = len({row["seed"] for row in mine}), said or ("centred" if begins else "drawn")
            found.append(f"| `{name}` | {said} | " + " | ".join(cells) + f" | {total} | {seeds} |")
    return "\n".join(found)


if __name__ == "__main__":
    main()
