"""Do masks of earlier domains help? Few and many images a class, two orders, beside methods of the same size.

    python benchmarks/cross.py --domain flowers=DIR --domain cubs=DIR … --base B --out results/cross.json \\
        [--images 5,20,all] [--seeds 0,1,2] [--recipe quick] [--epochs N] [--side N] [--limit N] [--sources 3]
        [--options per=channel,scalar_rate=1e-3] [--work WORK]
    python benchmarks/cross.py --table --out results/cross.json
    python benchmarks/cross.py --picture docs/assets/cross.svg --out results/cross.json

Sources are affine-full domains, learned from all images, of the domains that come before in the order (as given, and
reversed); `--sources N` keeps the N whose images look most alike. A target is learned with so many images a class by
affine-mix, affine-cross, affine-full, bn-only and classifier-only, all with the same images and recipe. `--options` go
to the two cross methods (options of the method, or fields of the recipe). `use` says how much each source moves the
weights of each layer: the mean of |a_s M_s + b_s W∘M_s| over the mean of |W|. A finished run is kept in `--out`, its
sources in `--work`; both are skipped when it is started again.
"""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kept import mean, read, recipe_of, training_options, write

import polymask as pm
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.data.split import SubsetSplit
from polymask.lifelong.cross import nearest_sources
from polymask.train.recipe import Recipe

CROSS = ("affine-mix", "affine-cross")
PLAIN = ("affine-full", "bn-only", "classifier-only")
ALL = "all"


def main() -> None:
    parser = training_options(__doc__, "cross.work")
    parser.add_argument("--domain", action="append", default=[], metavar="NAME=SOURCE")
    parser.add_argument("--images", default="5,20,all", help="of each class")
    parser.add_argument("--sources", type=int, default=16, help="at most, the likest first")
    parser.add_argument("--options", default="", help="of the cross methods: NAME=VALUE,…")
    parser.add_argument("--picture", type=Path, help="draw which domain used which, by layer")
    options = parser.parse_args()
    if options.picture is not None:
        draw(read(options.out), options.picture)
        return
    if options.table:
        print_table(read(options.out))
        return
    base = pm.load_base(options.base, weights=options.weights)
    sources = dict(given.split("=", 1) for given in options.domain)
    recipe = recipe_of(options)
    own = dict(pair.split("=", 1) for pair in options.options.split(",") if pair)
    for seed in map(int, options.seeds.split(",")):
        data = {name: load_data(source, seed=seed, limit=options.limit) for name, source in sources.items()}
        library = options.work / f"sources-{seed}"
        for title, order in (("forward", list(data)), ("backward", list(data)[::-1])):
            for place, target in enumerate(order[1:], 1):
                before = {name: source_pack(base, data[name], name, recipe, seed, library) for name in order[:place]}
                for count in options.images.split(","):
                    few = data[target] if count == ALL else some_of_each(data[target], int(count), seed)
                    run_all(base, few, (title, target, count, seed), before, recipe, own, options)


def run_all(base, data, key, before, recipe, own, options) -> None:
    """One target with so many images, by every method."""
    title, target, count, seed = key
    for method in (*CROSS, *PLAIN):
        # What draws on nothing does not depend on the order.
        name = " ".join(map(str, ([title] if method in CROSS else []) + [target, count, method, seed]))
        if method in CROSS and own:
            name += " " + ",".join(f"{n}={v}" for n, v in own.items())
        if name in read(options.out):
            continue
        how, used, chosen = recipe, {}, None
        if method in CROSS:
            chosen = nearest_sources(before, base, data, options.sources)
            how, used = with_options(recipe, own)
        learned = pm.learn(base, data, method, how, seed=seed, progress=False, sources=chosen, **used)
        row = {"order": title if chosen else None, "target": target, "images": count, "method": method, "seed": seed}
        row |= {"base": base.name, "recipe": how.to_json(), "options": own if chosen else {}}
        row |= {"test_accuracy": learned.test_accuracy, "sources": list(chosen or {})}
        row |= {"bits_per_weight": learned.domain.metrics["bits_per_weight"]}
        row["use"] = {s: use_of(base, learned.domain, place) for place, s in enumerate(chosen or {})}
        write(options.out, {name: row})
        print(f"{learned.test_accuracy:6.2f}  {name}", flush=True)


def source_pack(base, data: DomainData, name: str, recipe, seed: int, library: Path) -> Path:
    path = library / f"{name}.safetensors"
    if not path.exists():
        pm.learn(base, data, "affine-full", recipe, seed=seed, progress=False).domain.save(path)
    return path


def with_options(recipe: Recipe, own: dict[str, str]) -> tuple[Recipe, dict[str, Any]]:
    """The recipe with those options that are its fields, and the others."""
    known = {field.name for field in fields(Recipe)}
    values = {name: number(text) for name, text in own.items()}
    mine = {name: value for name, value in values.items() if name in known}
    return replace(recipe, **mine), {name: value for name, value in values.items() if name not in known}


def number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def some_of_each(data: DomainData, count: int, seed: int) -> DomainData:
    """So many training images of each class, the same for all methods; val and test stay whole."""
    order = np.random.default_rng(seed).permutation(len(data.train))
    labels = data.train.labels[order]
    chosen = np.sort(np.concatenate([order[labels == label][:count] for label in range(len(data.classes))]))
    return replace(data, train=SubsetSplit(data.train, chosen))


@torch.no_grad()
def use_of(base: pm.Base, domain: pm.Domain, place: int) -> dict[str, float]:
    """How much a source moves each layer's weights."""
    found = {}
    for name, transform in domain.named_transforms():
        W = base.tensor(name).view(transform.view_shape)
        mask = transform._masks()[place]
        moved = (transform.a[place] + transform.b[place] * W) * mask
        found[name] = float(moved.abs().mean() / W.abs().mean().clamp_min(1e-12))
    return found


def print_table(rows: dict[str, Any]) -> None:
    """A line for each method: mean test accuracy over targets, orders and seeds, by images a class."""
    runs = list(rows.values())
    counts = list(dict.fromkeys(row["images"] for row in runs))
    print(f"| method | options | {' | '.join(f'{count} images a class' for count in counts)} | bits per weight |")
    print("|---" * (len(counts) + 3) + "|")
    for method, own in dict.fromkeys((row["method"], json.dumps(row["options"])) for row in runs):
        mine = [row for row in runs if (row["method"], json.dumps(row["options"])) == (method, own)]
        cells = [mean(row["test_accuracy"] for row in mine if row["images"] == count) for count in counts]
        bits = mean((row["bits_per_weight"] for row in mine), 3)
        print(f"| {method} | {own if own != '{}' else '–'} | {' | '.join(cells)} | {bits} |")
    print("\n| target | source | mean use |\n|---|---|---|")
    pairs = dict.fromkeys((row["target"], source) for row in runs for source in row["use"])
    for target, source in pairs:
        uses = [np.mean(list(r["use"][source].values())) for r in runs if r["target"] == target and source in r["use"]]
        print(f"| {target} | {source} | {np.mean(uses):.4f} |")


def draw(rows: dict[str, Any], path: Path) -> None:
    """A map for each method: a row for each (target, source), a column for each layer, darker where it is used more."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, method in zip(figure.subplots(len(CROSS), 1), CROSS, strict=True):
        mine = [row for row in rows.values() if row["method"] == method]
        pairs = list(dict.fromkeys((row["target"], source) for row in mine for source in row["use"]))
        uses = [[list(r["use"][s].values()) for r in mine if r["target"] == t and s in r["use"]] for t, s in pairs]
        if not pairs:
            continue
        shown = axes.imshow([np.mean(use, 0) for use in uses], aspect="auto", cmap="Blues", vmin=0)
        axes.set(title=method, xlabel="layer, from input to output")
        axes.set_yticks(range(len(pairs)), [f"{target} from {source}" for target, source in pairs])
        figure.colorbar(shown, ax=axes, label="change of weights, of their mean size")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
