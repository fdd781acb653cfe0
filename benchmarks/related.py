"""Does a domain of the same kind help? The first half of a domain's classes is the source, the second the target.

    python benchmarks/related.py --domain gtsrb=DIR --domain flowers=DIR … --out results/related.json
        [--methods affine-centred,affine-centred+start,…] [--images 5,20,all] [--seeds 0,1,2]
        [--recipe standard] [--epochs N] [--least-steps N] [--side N] [--limit N] [--work WORK]
    python benchmarks/related.py --table --out results/related.json

The source learns from all images of its classes, the target from so many of each of the others, by every method; all
have the same images and recipe. What ends in `+start` begins as the source in place of as the base: masks as an
affine-centred domain, `finetune` as a fine-tuned network. `affine-cross` and `affine-mix` draw on that domain's masks,
with `+start` or without. A method's text may have options and fields of the recipe. `val` is of the target's validation
images; `+auto` in the table is the run that is better there, of that with `+start` and that without, as `--start auto`
decides. `heads` is what a head alone reaches there by the base's features and by the source's. A finished run is kept
in `--out`, its sources in `--work`; both are skipped when it is started again. `--part K/N` shares the domains among
processes.
"""

from statistics import fmean, stdev
from typing import Any

from cross import CENTRED, CROSS, SOURCE, as_few, source_pack
from extend import classes_between
from kept import add_part, part_of, read, recipe_of, training_options, write

import polymask as pm
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.lifelong.start import choose_start
from polymask.train.recipe import read_method

MIX = f"affine-mix:{CENTRED}:rate=1e-2:scalar_rate=3e-4"  # as cross.py found them on val, without a start
NORMS = "bn-only:rate=1e-2"
STARTED = "+start"
AUTO = "+auto"
METHODS = f"classifier-only,{NORMS},{MIX},{MIX}{STARTED},affine-full,{SOURCE},{SOURCE}{STARTED},"
METHODS += f"affine-cross:{CENTRED},affine-cross:{CENTRED}{STARTED},finetune,finetune{STARTED}"


def main() -> None:
    parser = training_options(__doc__, "related.work")
    parser.add_argument("--domain", action="append", default=[], metavar="NAME=SOURCE")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--images", default="5", help="of each class")
    parser.add_argument("--least-steps", type=int, default=100, help="of a training with few images")
    add_part(parser)
    options = parser.parse_args()
    if options.table:
        print_table(read(options.out))
        return
    base = pm.load_base(options.base, weights=options.weights)
    recipe = recipe_of(options)
    for seed in map(int, options.seeds.split(",")):
        for given in part_of(options.domain, options.part):
            name, source = given.split("=", 1)
            run(base, name, load_data(source, seed=seed, limit=options.limit), recipe, seed, options)


def run(base: pm.Base, name: str, data: DomainData, recipe: pm.Recipe, seed: int, options: Any) -> None:
    """The second half of a domain's classes by every method, with the first as the source."""
    middle = len(data.classes) // 2
    first, second = classes_between(data, 0, middle), classes_between(data, middle, len(data.classes))
    library = options.work / f"sources-{seed}"

    def source(method: str) -> pm.Domain:
        return pm.load_domain(source_pack(base, first, name, recipe, seed, library / method, method), base)

    for count in options.images.split(","):
        few, usual = as_few(second, count, seed, recipe, options.least_steps)
        about = {"domain": name, "images": count, "seed": seed, "base": base.name, "trained_on": len(few.train)}
        key = f"heads {name} {count} {seed}"
        if key not in read(options.out):
            own = pm.new_domain(base, "classifier-only", few.classes)
            spec = usual.input(base.input, squash=few.squash)
            heads = choose_start({"base": own, "source": source(SOURCE)}, base, few, spec).reached
            write(options.out, {key: about | {"heads": dict(heads)}})
            print(key, heads, flush=True)
        for text in options.methods.split(","):
            key = f"{name} {count} {text} {seed}"
            if key in read(options.out):
                continue
            method = read_method(text.removesuffix(STARTED))
            how = method.recipe(usual)
            helps = {"sources": {name: source(SOURCE)}} if method.name in CROSS else {}
            if text.endswith(STARTED):
                helps["start"] = source("finetune" if method.name == "finetune" else SOURCE)
            learned = pm.learn(base, few, method.method(usual), how, seed=seed, progress=False, **helps)
            row = about | {"method": text, "recipe": how.to_json(), "val": learned.domain.metrics["val_accuracy"]}
            row |= {"test": learned.test_accuracy, "bits_per_weight": learned.domain.metrics["bits_per_weight"]}
            write(options.out, {key: row})
            print(f"{row['val']:6.2f} {row['test']:6.2f}  {key}", flush=True)


def print_table(rows: dict[str, Any]) -> None:
    """A line for each method: test by domain, the mean of domains, and the spread of that mean over seeds.

    `auto` is as `--start auto` does: of the run that began as the source and the one that did not, the better by val.
    """
    heads = [row for row in rows.values() if "heads" in row]
    runs = [row for row in rows.values() if "method" in row]
    for count in dict.fromkeys(row["images"] for row in heads):
        tried = {(row["domain"], row["seed"]): row for row in heads if row["images"] == count}
        done = {(r["domain"], r["seed"], r["method"]): r for r in runs if r["images"] == count}
        for key, row in list(done.items()):
            plain = done.get((*key[:2], key[2].removesuffix(STARTED)))
            if key[2].endswith(STARTED) and plain is not None:
                better = row if row["val"] > plain["val"] else plain
                done[*key[:2], key[2].replace(STARTED, AUTO)] = better
        tests = {key: row["test"] for key, row in done.items()}
        names, seeds = (list(dict.fromkeys(key[place] for key in tried)) for place in (0, 1))
        print_row(f"{count} images a class", [*names, "mean"])
        print("|---" * (len(names) + 2) + "|")
        for shown in ("base", "source"):
            means = [fmean(row["heads"][shown] for (n, _), row in tried.items() if n == name) for name in names]
            print_row(f"a head on the {shown}'s features, val", [f"{value:.1f}" for value in [*means, fmean(means)]])
        for text in sorted({method for _, _, method in tests}):
            found = {key: tests[*key, text] for key in tried if (*key, text) in tests}
            columns = [[found[name, seed] for seed in seeds if (name, seed) in found] for name in names]
            whole = [[found[name, seed] for name in names] for seed in seeds if all((n, seed) in found for n in names)]
            cells = [f"{fmean(column):.1f}" if column else "–" for column in columns]
            name, _, how = text.partition("+")
            print_row(f"`{name.split(':')[0]}`{how and f', {how}'}", [*cells, spread_of([fmean(row) for row in whole])])
        print()
        ahead = sum(row["heads"]["source"] > row["heads"]["base"] for row in tried.values())
        print(f"A head alone is better on the source's features on val {ahead} of {len(tried)} times.\n")
        pairs = [(row, done.get((*key[:2], key[2] + STARTED))) for key, row in done.items()]
        found = [(one["val"] < two["val"], one["test"] < two["test"]) for one, two in pairs if two is not None]
        other = sum(val != test for val, test in found)
        print(f"Of {len(found)} pairs with and without a start val says otherwise than test in {other}.\n")


def print_row(title: str, cells: list[str]) -> None:
    print(f"| {title} | {' | '.join(cells)} |")


def spread_of(means: list[float]) -> str:
    """The mean of what seeds gave, and its deviation."""
    spread = f" ± {stdev(means):.1f}" if len(means) > 1 else ""
    return f"{fmean(means):.1f}{spread}" if means else "–"


if __name__ == "__main__":
    main()
