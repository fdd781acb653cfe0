"""Do masks of earlier domains help? Few and many images a class, two orders, beside methods of the same size.

    python benchmarks/cross.py --domain flowers=DIR --domain cubs=DIR … --base B --out results/cross.json \\
        [--methods affine-mix:rate=3e-3,bn-only:rate=3e-3,…] [--targets dtd,gtsrb] [--images 5,20,all] [--seeds 0,1,2]
        [--recipe standard] [--epochs N] [--least-steps N] [--side N] [--limit N] [--sources 3] [--work WORK]
    python benchmarks/cross.py --table --out results/cross.json
    python benchmarks/cross.py --picture docs/assets/cross.svg --out results/cross.json

Sources are affine-centred domains, learned from all images, of the domains that come before in the order (as given, and
reversed); `--sources N` keeps the N whose images look most alike. A target is learned with so many images a class by
every method, all with the same images and recipe; a method's text may have options and fields of the recipe, such as
the rate that suits it. Few images are gone through more often: with `--least-steps` as often as gives so many steps.
`val` is of the target's validation images, by which rates and options are to be chosen. `use` says how much each source
moves the weights of each layer: the mean of |a_s M_s + b_s W∘M_s| over the mean of |W|. A finished run is kept in
`--out`, its sources in `--work`; both are skipped when it is started again.
"""

from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from kept import mean, read, recipe_of, training_options, write

import polymask as pm
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.data.split import SubsetSplit
from polymask.lifelong.cross import nearest_sources
from polymask.train.recipe import read_method

CROSS = ("affine-mix", "affine-cross")
CENTRED = "form=centred:k0=learned"
METHODS = f"affine-mix:{CENTRED},affine-cross:{CENTRED},affine-centred,bn-only,classifier-only"
ALL = "all"
SOURCE = "affine-centred"  # how sources are learned


def main() -> None:
    parser = training_options(__doc__, "cross.work")
    parser.add_argument("--domain", action="append", default=[], metavar="NAME=SOURCE")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--targets", help="only these")
    parser.add_argument("--images", default="5,20,all", help="of each class")
    parser.add_argument("--least-steps", type=int, default=0, help="of a training with few images")
    parser.add_argument("--sources", type=int, default=16, help="at most, the likest first")
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
    for seed in map(int, options.seeds.split(",")):
        data = {name: load_data(source, seed=seed, limit=options.limit) for name, source in sources.items()}
        library = options.work / f"sources-{seed}"
        for title, order in (("forward", list(data)), ("backward", list(data)[::-1])):
            for place, target in enumerate(order[1:], 1):
                if options.targets is not None and target not in options.targets.split(","):
                    continue
                before = {name: source_pack(base, data[name], name, recipe, seed, library) for name in order[:place]}
                for count in options.images.split(","):
                    few, how = as_few(data[target], count, seed, recipe, options.least_steps)
                    run_all(base, few, (title, target, count, seed), before, how, options)


def as_few(data: DomainData, count: str, seed: int, recipe, least_steps: int) -> tuple[DomainData, pm.Recipe]:
    """The domain with so many images a class, and the recipe with epochs for as many steps."""
    few = data if count == ALL else some_of_each(data, int(count), seed)
    epochs = ceil(least_steps / ceil(len(few.train) / recipe.batch_size))
    return few, replace(recipe, epochs=max(recipe.epochs, epochs))


def run_all(base, data, key, before, recipe, options) -> None:
    """One target with so many images, by every method."""
    title, target, count, seed = key
    for text in options.methods.split(","):
        method = read_method(text)
        # What draws on nothing does not depend on the order.
        draws = method.name in CROSS
        name = " ".join(map(str, ([title] if draws else []) + [target, count, text, seed]))
        if name in read(options.out):
            continue
        chosen = nearest_sources(before, base, data, options.sources) if draws else None
        how = method.recipe(recipe)
        learned = pm.learn(base, data, method.method(recipe), how, seed=seed, progress=False, sources=chosen)
        row = {"order": title if draws else None, "target": target, "images": count, "method": text, "seed": seed}
        row |= {"base": base.name, "recipe": how.to_json(), "sources": list(chosen or {})}
        row |= {"val": learned.domain.metrics["val_accuracy"], "test_accuracy": learned.test_accuracy}
        row |= {"bits_per_weight": learned.domain.metrics["bits_per_weight"]}
        row["use"] = {s: use_of(base, learned.domain, place) for place, s in enumerate(chosen or {})}
        write(options.out, {name: row})
        print(f"{row['val']:6.2f} {learned.test_accuracy:6.2f}  {name}", flush=True)


def source_pack(base, data: DomainData, name: str, recipe, seed: int, library: Path, method=SOURCE) -> Path:
    path = library / f"{name}.safetensors"
    if not path.exists():
        pm.learn(base, data, method, recipe, seed=seed, progress=False).domain.save(path)
    return path


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
        a, b = (transform.scalars()[f"{part}{place}"].view(transform.scalar_shape) for part in ("a", "b"))
        moved = (a + b * W) * transform._masks()[place]
        found[name] = float(moved.abs().mean() / W.abs().mean().clamp_min(1e-12))
    return found


def print_table(rows: dict[str, Any]) -> None:
    """A line for each method: val and test by images a class, the mean over targets of what orders and seeds gave."""
    runs = list(rows.values())
    counts = list(dict.fromkeys(row["images"] for row in runs))
    print(f"| method | {' | '.join(f'{count} images a class: val / test' for count in counts)} | bits per weight |")
    print("|---" * (len(counts) + 2) + "|")
    for method in sorted(dict.fromkeys(row["method"] for row in runs)):
        mine = [row for row in runs if row["method"] == method]
        pairs = [[mean(by_target(mine, count, what).values()) for what in ("val", "test_accuracy")] for count in counts]
        bits = mean((row["bits_per_weight"] for row in mine), 3)
        print(f"| `{method}` | {' | '.join(' / '.join(pair) for pair in pairs)} | {bits} |")
    targets = list(dict.fromkeys(row["target"] for row in runs))
    print(f"\n| test | {' | '.join(targets)} |")
    print("|---" * (len(targets) + 1) + "|")
    for count in counts:
        for method in sorted(dict.fromkeys(row["method"] for row in runs if row["images"] == count)):
            found = by_target([row for row in runs if row["method"] == method], count, "test_accuracy")
            numbers = " | ".join(f"{found[target]:.1f}" if target in found else "–" for target in targets)
            print(f"| `{method.split(':')[0]}`, {count} images a class | {numbers} |")


def by_target(runs: list[dict[str, Any]], count: str, what: str) -> dict[str, float]:
    """The mean over orders and seeds of what was measured with so many images, by target."""
    found: dict[str, list[float]] = {}
    for row in runs:
        if row["images"] == count and row[what] is not None:
            found.setdefault(row["target"], []).append(row[what])
    return {target: fmean(values) for target, values in found.items()}


def draw(rows: dict[str, Any], path: Path) -> None:
    """A map for each method: a row for each (target, source), a column for each layer, darker where it is used more."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 10), layout="constrained")
    for axes, method in zip(figure.subplots(len(CROSS), 1), CROSS, strict=True):
        mine = [row for row in rows.values() if row["method"].split(":")[0] == method]
        pairs = sorted({(row["target"], source) for row in mine for source in row["use"]})
        uses = [[list(r["use"][s].values()) for r in mine if r["target"] == t and s in r["use"]] for t, s in pairs]
        if not pairs:
            continue
        shown = axes.imshow([np.mean(use, 0) for use in uses], aspect="auto", cmap="Blues", vmin=0)
        axes.set(title=method, xlabel="layer, from input to output")
        axes.set_yticks(range(len(pairs)), [f"{target} from {source}" for target, source in pairs])
        figure.colorbar(shown, ax=axes, label="change of weights, of their mean size")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
