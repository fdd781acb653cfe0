"""What the first steps do to the features, with heads that begin at random numbers and centred, at two rates each.

    python benchmarks/head_start.py --domain cars=sketch:DATA/cars --domain flowers=DIR … --side 64 --seeds 0 \\
        --out results/head-start.json [--methods affine-full,affine-centred,finetune] [--rates 3e-4,1e-3] [--steps 60]
    python benchmarks/head_start.py --table --out results/head-start.json

Each run trains for some steps by the recipe, whose warm-up is over after an epoch. Written down at some of the steps:
the loss of that batch, and how far the features of 64 validation images are spread over the images, as a share of what
it was before training; at 0 the network says the same of every image. A finished run is kept in `--out`.
"""

from dataclasses import replace

import torch
from kept import mean, read, recipe_of, training_options, write

import polymask as pm
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.train.descent import begin_head
from polymask.train.learn import make_loaders
from polymask.train.learner import DomainLearner, placed_batches
from polymask.train.recipe import method_by

STARTS = {
    f"{start}, {rate:g}": {"head_start": start, "head_rate": rate}
    for start in ("drawn", "centred")
    for rate in (2e-3, 5e-4)
}  # at the rates of the recipes `quick` and `standard`
WATCHED = 64  # validation images


def main() -> None:
    parser = training_options(__doc__, "head_start.work")
    parser.add_argument("--domain", action="append", default=[], metavar="NAME=SOURCE")
    parser.add_argument("--methods", default="affine-full,affine-centred,finetune")
    parser.add_argument("--rates", default="3e-4,1e-3")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if options.table:
        print_table(list(read(options.out).values()))
        return
    torch.set_num_threads(1)
    base = pm.load_base(options.base, weights=options.weights)
    for seed in map(int, options.seeds.split(",")):
        for given in options.domain:
            name, source = given.split("=", 1)
            data = load_data(source, seed=seed, limit=options.limit)
            for method in options.methods.split(","):
                for rate in map(float, options.rates.split(",")):
                    for start, fields in STARTS.items():
                        key = f"{name} {method} {rate:g} {start} {seed}"
                        if key in read(options.out):
                            continue
                        recipe = replace(recipe_of(options), rate=rate, weight_rate=rate, **fields)
                        row = {"domain": name, "method": method, "rate": rate, "start": start, "seed": seed}
                        row |= {"base": base.name, "recipe": recipe.to_json()}
                        row |= {"steps": first_steps(base, data, method, recipe, options.steps, seed)}
                        write(options.out, {key: row})
                        print(key, row["steps"][-1], flush=True)


def first_steps(base: pm.Base, data: DomainData, method: str, recipe: pm.Recipe, steps: int, seed: int) -> list[dict]:
    """Loss and spread every five steps."""
    loaders = make_loaders(replace(data, test=None), base.input, recipe, seed=seed)
    torch.manual_seed(seed)
    domain = pm.new_domain(base, method_by(recipe, method), data.classes)
    if recipe.head_start == "centred":
        begin_head(base, domain, placed_batches(loaders.train, base, recipe))
    learner = DomainLearner(base, domain, recipe)
    watched = torch.cat([images for images, _ in loaders.val.batches()][:2])[:WATCHED]
    before, found, done = spread(base, domain, watched), [], 0
    while done < steps:
        learner.begin_epoch()
        for images, labels in loaders.train.batches(done // len(loaders.train)):
            loss = learner.step(images, labels, done / len(loaders.train)).loss
            done += 1
            if done % 5 == 0:
                share = spread(base, domain, watched) / before
                found.append({"step": done, "loss": round(loss, 3), "spread": round(share, 4)})
            if done == steps:
                break
    return found


@torch.no_grad()
def spread(base: pm.Base, domain: pm.Domain, images: torch.Tensor) -> float:
    """The standard deviation of a feature over images, the mean over features."""
    with domain.in_mode(training=False):
        return float(domain.features(base, base.placed(images)).std(0).mean())


def print_table(rows: list[dict]) -> None:
    """A line for each domain, method and rate: the last spread and the loss of the last steps, by start."""
    print(f"| domain | method | rate | {' | '.join(STARTS)} |")
    print("|---" * (len(STARTS) + 3) + "|")
    for place in dict.fromkeys((row["domain"], row["method"], row["rate"]) for row in rows):
        cells = []
        for start in STARTS:
            mine = [r["steps"] for r in rows if (r["domain"], r["method"], r["rate"], r["start"]) == (*place, start)]
            spread_now = mean((steps[-1]["spread"] for steps in mine), 2)
            cells.append(f"{spread_now} / {mean((step['loss'] for steps in mine for step in steps[-3:]), 2)}")
        print(f"| {place[0]} | {place[1]} | {place[2]:g} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
