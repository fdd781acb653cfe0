"""What so many minutes give: `polymask learn --minutes`, and what people would do instead on the same machine.

    python benchmarks/first_minutes.py --search --data ../shared/data --out results/first-minutes.json
    python benchmarks/first_minutes.py --data ../shared/data --out results/first-minutes.json      # goes on if cut
    python benchmarks/first_minutes.py --table --out results/first-minutes.json
    python benchmarks/first_minutes.py --table --out results/first-minutes.json --figure docs/assets/first-minutes.svg

Every run has one core to itself. On a machine with two, two processes share the runs, each bound to its core:

    taskset -c 0 python benchmarks/first_minutes.py … --part 0/2 &
    taskset -c 1 python benchmarks/first_minutes.py … --part 1/2

Four ways, interleaved domain by domain, each with 1, 3 and 10 minutes from the first image read to the network that is
measured; test images are measured after that, and never looked at before:

* polymask       `pm.learn(base, data, minutes=M)`, its default method and recipe
* regression     frozen features at the largest side that one pass has time for, and scikit-learn's LogisticRegression;
                 its strength is chosen on val, and with it train and val are fitted together
* fine-tuning    a plain loop over timm's network: Adam, half a cosine, steps until the time is over, the head at 2e-3
* LoRA           the same loop over PEFT's LoRA of rank 8 on every convolution

The loops get what polymask gives itself: images decoded once, the same random crops, the layout of images and the type
of numbers that are fastest, sizes by the same rules from their own timed steps, images that grow, and the size at test
chosen on val; and unlike it they use all of the time. They do not get what a plain loop has not: a head that begins
centred and is fitted again, and the regression as a rival on val. Their rate, and whether batch norms keep the base's
statistics, is the best on val of what `--search` tries, on Flowers with two minutes; a loop that is no better on val
than naming its most frequent class begins again at a third of it, with all of the time (`at_chance`). polymask has its
default's. Needs timm, peft and scikit-learn. Nothing else may run meanwhile.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from kept import add_part, part_of, read, write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import polymask as pm
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.data.loader import loader_at
from polymask.train.learn import make_loaders
from polymask.train.minutes import (
    FASTER,
    FASTER_BF16,
    MEASURING,
    OFTEN,
    SMALLER,
    Pace,
    faster,
    seconds_to_read,
    sides_for,
)
from polymask.train.predict import images_last
from polymask.train.recipe import RECIPES, method_by
from polymask.train.regression import AT_ONCE
from polymask.train.sizing import TRIED

BASE, TIMM = "efficientnet-lite0", "tf_efficientnet_lite0"
DOMAINS = {
    "flowers": "sketch:{data}/sketch-mini/flowers",
    "dtd": "decathlon:{data}/decathlon-mini/dtd",
    "gtsrb": "decathlon:{data}/decathlon-mini/gtsrb",
    "letters": "letters",
    "solar-cells": "solar-cells",
}
TRIED_RATES = {
    "fine-tuning": {"own": (1e-3, 3e-3, 1e-2, 3e-2), "base's": (1e-4, 3e-4, 1e-3)},
    "LoRA": {"own": (3e-3, 1e-2, 3e-2), "base's": (3e-4, 1e-3, 3e-3, 1e-2)},
}  # by the statistics that batch norms have
MOMENTUM = 0.1  # of own statistics: the network's own, 0.01, is too slow for so few steps
SEARCHED = {"domain": "flowers", "minutes": 2}
WAYS = ("polymask", "regression", "fine-tuning", "LoRA")
COLOURS = {"polymask": "#c0392b", "regression": "#7f8c8d", "fine-tuning": "#2471a3", "LoRA": "#b9770e"}
QUICK = RECIPES["quick"]
HEAD_RATE = QUICK.head_rate
Result = dict[str, Any]
Predict = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the folder with sketch-mini and decathlon-mini")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=list(DOMAINS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--minutes", type=float, nargs="+", default=[1, 3, 10])
    parser.add_argument("--limit", type=int, default=2048, help="training images a domain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    add_part(parser)
    parser.add_argument("--search", action="store_true", help="try the rates of the two loops, and measure nothing")
    parser.add_argument("--table", action="store_true", help="print what was measured before")
    parser.add_argument("--figure", type=Path, help="draw it")
    options = parser.parse_args()
    if not options.table:
        torch.set_num_threads(1)
        measure(options)
    runs = rows(options.out, "run")
    if options.figure is not None:
        draw(runs, options.figure)
    print(table(runs))


def measure(options: argparse.Namespace) -> None:
    """All runs of this process's part that are not in the file yet, each written as soon as it is done."""
    base = pm.load_base(BASE)
    asked = searches() if options.search else runs(options.minutes, options.domains, options.ways)
    loops_of = {} if options.search else {way: chosen(way, rows(options.out, "search")) for way in TRIED_RATES}
    for run in part_of(asked, options.part):
        key = " ".join(value if isinstance(value, str) else f"{value:g}" for value in run.values())
        if key in read(options.out):
            continue
        data = load_data(DOMAINS[run["domain"]].format(data=options.data), seed=options.seed, limit=options.limit)
        if options.search:
            torch.manual_seed(options.seed)
            loop = {"statistics": run["statistics"], "rate": run["rate"]}
            about = by_loop(run["way"], base, replace(data, test=None), run["minutes"], options.seed, loop)[1]
        else:
            about = measured(run["way"], base, data, run["minutes"], options.seed, loops_of.get(run["way"]))
        row = run | about | {"base": BASE, "seed": options.seed, "limit": options.limit}
        write(options.out, {key: row})
        print(row, flush=True)


def searches() -> list[Result]:
    """The loops at the rates of their ladders, to be compared on val."""
    return [{"what": "search", "way": way} | SEARCHED | loop for way in TRIED_RATES for loop in loops(way)]


def runs(minutes: Iterable[float], domains: Sequence[str], ways: Sequence[str]) -> list[Result]:
    """All ways on each domain before the next; each domain begins with another, so that no core has always the same."""
    return [
        {"what": "run", "domain": domain, "way": ways[(place + turn) % len(ways)], "minutes": m}
        for m in minutes
        for turn, domain in enumerate(domains)
        for place in range(len(ways))
    ]


def rows(file: Path, what: str) -> list[Result]:
    """What the file has of searches or runs."""
    return [row for row in read(file).values() if row["what"] == what]


def loops(way: str) -> list[Result]:
    """What is tried for a loop."""
    return [{"statistics": whose, "rate": rate} for whose, rates in TRIED_RATES[way].items() for rate in rates]


def chosen(way: str, tried: list[Result]) -> Result:
    """What was best on val; of equals the first."""
    mine = [row for row in tried if row["way"] == way]
    if len(mine) < len(loops(way)):
        raise SystemExit(f"{way} has no rate yet: run with --search first")
    best = max(mine, key=lambda row: row["val"])
    return {name: best[name] for name in ("statistics", "rate")}


def measured(way: str, base: pm.Base, data: DomainData, minutes: float, seed: int, loop: Result | None) -> Result:
    """One way with so many minutes, and then its accuracy on test."""
    torch.manual_seed(seed)
    seen = replace(data, test=None)
    began = time.perf_counter()
    if loop is not None:
        predict, about = by_loop(way, base, seen, minutes, seed, loop)
        if about["val"] <= 100 * np.bincount(data.val.labels).max() / len(data.val):
            began = time.perf_counter()
            slower = loop | {"rate": loop["rate"] / 3}
            predict, about = by_loop(way, base, seen, minutes, seed, slower)
            about |= {"at_chance": loop["rate"]}
    else:
        predict, about = {"polymask": by_polymask, "regression": by_regression}[way](base, seen, minutes, seed)
    seconds = time.perf_counter() - began
    spec = replace(base.input.at(about["test_side"]), crop=about.pop("crop", base.input.crop), squash=data.squash)
    assert data.test is not None
    return {"test": accuracy(predict, loader_at(data.test, spec)), "seconds": round(seconds, 1)} | about


def by_polymask(base: pm.Base, data: DomainData, minutes: float, seed: int) -> tuple[Predict, Result]:
    """The default of `polymask learn --minutes`."""
    domain = pm.learn(base, data, minutes=minutes, seed=seed, progress=False).domain
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "domain.safetensors"
        domain.save(file)
        size = file.stat().st_size
    recipe = domain.recipe
    about = {"method": domain.method.name, "epochs": recipe["epochs"], "side": recipe["side"]}
    about |= {"test_side": domain.input.side, "crop": domain.input.crop, "bytes": size}
    about |= {"bfloat16": recipe["autocast"], "channels_last": recipe["channels_last"]}
    return domain.merged(base), about


def by_regression(base: pm.Base, data: DomainData, minutes: float, seed: int) -> tuple[Predict, Result]:
    """Frozen features, and the best of some strengths on val."""
    from sklearn.linear_model import LogisticRegression

    seconds = 60 * minutes
    net = base.net.eval()
    side = regression_side(base, data, seconds)
    features = {}
    for part in ("train", "val"):
        loader = loader_at(data.splits()[part], replace(base.input.at(side), squash=data.squash))
        found = [(seen(net, images), labels) for images, labels in loader.batches()]
        features[part] = tuple(torch.cat(each).numpy() for each in zip(*found, strict=True))
    (x, y), (held_out, truths) = features["train"], features["val"]
    shift, scale = x.mean(0), x.std(0) + 1e-6
    x_val = (held_out - shift) / scale
    fitted = [LogisticRegression(C=c, max_iter=200).fit((x - shift) / scale, y) for c in (0.001, 0.01, 0.1, 1)]
    best = max(fitted, key=lambda model: model.score(x_val, truths))
    best.fit(np.concatenate([(x - shift) / scale, x_val]), np.concatenate([y, truths]))
    head = nn.Linear(x.shape[1], len(data.classes))
    weight = torch.from_numpy(best.coef_ / scale).float()
    bias = torch.from_numpy(best.intercept_).float() - weight @ torch.from_numpy(shift)
    if len(best.coef_) == 1:  # of two classes the second's is given
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
    head.load_state_dict({"weight": weight, "bias": bias})

    def predict(images: Tensor) -> Tensor:
        logits: Tensor = head(seen(net, images))
        return logits

    return predict, {"side": side, "test_side": side, "bytes": sum(p.nbytes for p in head.parameters())}


def seen(net: nn.Module, images: Tensor) -> Tensor:
    """Features, as fast as polymask has them: channels last, and few images at once."""
    return torch.cat([net(part).flatten(1) for part in images_last(images).split(AT_ONCE)])


def regression_side(base: pm.Base, data: DomainData, seconds: float) -> int:
    """The largest side at which one pass takes at most three fifths of the time, by one timed batch each."""
    images = len(data.train) + len(data.val)
    best = 64
    for side in (96, 128, 160, 192, 224):
        batch = torch.randn(32, 3, side, side)
        began = time.perf_counter()
        seen(base.net, batch)
        if images * (time.perf_counter() - began) / 32 > 0.6 * seconds:
            break
        best = side
    return best


def by_loop(
    way: str, base: pm.Base, data: DomainData, minutes: float, seed: int, loop: Result
) -> tuple[Predict, Result]:
    """A plain loop over timm's network with a new classifier, or over PEFT's LoRA of it."""
    began = time.perf_counter()
    net, head, body = timm_network(way, base, len(data.classes))
    optimiser = torch.optim.Adam([{"params": body, "lr": loop["rate"]}, {"params": head, "lr": HEAD_RATE}])
    rates = [group["lr"] for group in optimiser.param_groups]
    sides = sides_for(base, method_by(QUICK, "classifier-only"), data)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)] if loop["statistics"] == "base's" else []

    def step(recipe: pm.Recipe, images: Tensor, labels: Tensor) -> None:
        net.train()
        for norm in norms:
            norm.eval()
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.autocast):
            loss = cross_entropy(net(images.contiguous(memory_format=layout_of(recipe))), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    def seconds_of(recipe: pm.Recipe, most: float) -> float:
        net.to(memory_format=layout_of(recipe))
        return seconds_of_step(partial(step, recipe), sides[0], len(data.classes))

    start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    recipe = faster(QUICK, replace(QUICK, channels_last=not QUICK.channels_last), FASTER, seconds_of)
    recipe = faster(recipe, replace(recipe, autocast=True), FASTER_BF16, seconds_of)
    net.to(memory_format=layout_of(recipe))
    pace = pace_of(partial(step, recipe), sides, len(data.classes))
    net.load_state_dict(start)
    optimiser.state.clear()
    end = began + 60 * minutes
    plan, measuring = loop_plan(recipe, pace, sides, data, end - time.perf_counter() - seconds_to_read(data, base) / 2)
    train = make_loaders(data, base.input, plan, seed=seed).train
    start_of_steps, done = time.perf_counter(), 0
    whole = end - measuring - start_of_steps
    for images, labels in (batch for epoch in count() for batch in train.batches(epoch)):
        passed = (time.perf_counter() - start_of_steps) / whole
        if passed >= 1:
            break
        warm = min(1.0, done / len(train)) if plan.epochs > 1 else 1.0
        for group, full in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = full * warm * 0.5 * (1 + math.cos(math.pi * passed))
        step(recipe, images, labels)
        done += 1
    net.eval()
    assert plan.side is not None
    spec = replace(base.input, squash=data.squash)
    on_val = {side: accuracy(net, loader_at(data.val, spec.at(side))) for side in test_sides(plan.side)}
    test_side = max(on_val, key=lambda side: (on_val[side], -side))
    learned = sum(p.nbytes for p in (*body, *head)) + sum(b.nbytes for b in net.buffers())
    about = loop | {"val": on_val[test_side], "epochs": round(done / len(train), 2), "side": plan.side}
    about |= {"test_side": test_side, "bytes": learned}
    return net, about | {"bfloat16": recipe.autocast, "channels_last": recipe.channels_last}


def loop_plan(
    recipe: pm.Recipe, pace: Pace, sides: list[int], data: DomainData, seconds: float
) -> tuple[pm.Recipe, float]:
    """The largest side with which every image is seen `OFTEN` times, as polymask chooses it; seconds that val takes."""
    plans = []
    for side in sides:
        first = max((one for one in sides if one <= SMALLER * side), default=side)
        measuring = len(data.val) * MEASURING * sum(pace.seconds(tried) for tried in test_sides(side))
        epochs = (seconds - measuring) / (len(data.train) * (pace.seconds(first) + pace.seconds(side)) / 2)
        plans.append((replace(recipe, side=side, first_side=first, epochs=max(1, round(epochs))), measuring))
    often = [plan for plan in plans if plan[0].epochs >= OFTEN]
    return often[-1] if often else plans[0]


def layout_of(recipe: pm.Recipe) -> torch.memory_format:
    return torch.channels_last if recipe.channels_last else torch.contiguous_format


def timm_network(way: str, base: pm.Base, classes: int) -> tuple[nn.Module, list[nn.Parameter], list[nn.Parameter]]:
    """The base's network in timm's hands; parameters of its head, and those of the rest that learn."""
    import timm

    net = timm.create_model(TIMM, num_classes=classes)
    missing = net.load_state_dict(base.net.state_dict(), strict=False).missing_keys
    if set(missing) != {"classifier.weight", "classifier.bias"}:
        raise SystemExit(f"timm's {TIMM} is not the base's network; it misses {missing[:3]}")
    net = net.to(memory_format=torch.channels_last)
    for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = MOMENTUM
    if way == "LoRA":
        from peft import LoraConfig, get_peft_model

        layers = [n for n, m in net.named_modules() if isinstance(m, nn.Conv2d) and m.groups == 1]
        net = get_peft_model(net, LoraConfig(r=8, target_modules=layers, modules_to_save=["classifier"]))
    head = [p for name, p in net.named_parameters() if "classifier" in name and p.requires_grad]
    ids = {id(p) for p in head}
    return net, head, [p for p in net.parameters() if p.requires_grad and id(p) not in ids]


def pace_of(step: Callable[[Tensor, Tensor], None], sides: list[int], classes: int) -> Pace:
    """What an image costs in this loop, by three timed steps at two sides."""
    small, large = sides[0], sides[len(sides) // 2]
    per_image = {side: seconds_of_step(step, side, classes) / QUICK.batch_size for side in (small, large)}
    by_area = max(0.0, (per_image[large] - per_image[small]) / (large**2 - small**2))
    return Pace(max(0.0, per_image[small] - by_area * small**2), by_area)


def seconds_of_step(step: Callable[[Tensor, Tensor], None], side: int, classes: int) -> float:
    """The median of three steps, after one that is not timed."""
    images, labels = torch.randn(QUICK.batch_size, 3, side, side), torch.arange(QUICK.batch_size) % classes
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        step(images, labels)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def test_sides(side: int) -> list[int]:
    """The sides at test that polymask tries too."""
    return sorted({side} | {8 * round(factor * side / 8) for factor in TRIED})


@torch.no_grad()
def accuracy(predict: Predict, batches: Any) -> float:
    """Percent of the images that are classified right."""
    right = [(predict(images).argmax(1) == labels).float() for images, labels in batches.batches()]
    return round(100 * float(torch.cat(right).mean()), 2)


def table(runs: list[Result]) -> str:
    """A row for each way with so many minutes: the mean over domains that all have, each domain, bytes, seconds."""
    minutes = sorted({run["minutes"] for run in runs})
    ways, domains = (
        [each for each in known if each in {run[what] for run in runs}]
        for what, known in (("way", WAYS), ("domain", DOMAINS))
    )
    found = {(run["minutes"], run["way"], run["domain"]): run for run in runs}
    heads = ["minutes", "way", "mean", *domains, "MB", "seconds, most"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for m in minutes:
        common = [d for d in domains if all((m, way, d) in found for way in ways)]
        for way in ways:
            mine = [found.get((m, way, d)) for d in domains]
            cells = [f"{m:g}", way]
            cells.append(f"**{mean(found[m, way, d]['test'] for d in common):.1f}**" if common else "–")
            cells += ["–" if run is None else f"{run['test']:.1f}" for run in mine]
            there = [run for run in mine if run is not None]
            cells.append(f"{mean(run['bytes'] for run in there) / 1e6:.2f}" if there else "–")
            took = [run["seconds"] for run in there]
            cells.append(f"{mean(took):.0f}, {max(took):.0f}" if took else "–")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(runs: list[Result], file: Path) -> None:
    """Accuracy against minutes: the mean over domains that all ways have with all minutes, and every domain."""
    from matplotlib import pyplot as plt

    domains = [domain for domain in DOMAINS if any(run["domain"] == domain for run in runs)]
    found = {(run["minutes"], run["way"], run["domain"]) for run in runs}
    everywhere = [d for d in domains if all((m, way, d) in found for m, way in {(m, way) for m, way, _ in found})]
    figure, axes = plt.subplots(1, len(domains) + 1, figsize=(2.6 * (len(domains) + 1), 3.1), layout="constrained")
    for place, title in enumerate(["mean", *domains]):
        mine = [run for run in runs if run["domain"] in (everywhere if title == "mean" else [title])]
        for way in (way for way in WAYS if any(run["way"] == way for run in mine)):
            by_minutes: dict[float, list[float]] = {}
            for run in mine:
                if run["way"] == way:
                    by_minutes.setdefault(run["minutes"], []).append(run["test"])
            points = sorted((m, mean(values)) for m, values in by_minutes.items())
            axes[place].plot(*zip(*points, strict=True), marker="o", ms=4, color=COLOURS[way], label=way)
        name = title if title in domains else "mean" if everywhere == domains else f"mean of {', '.join(everywhere)}"
        axes[place].set(xscale="log", title=name, xlabel="minutes")
        axes[place].set_xticks(
            sorted({run["minutes"] for run in mine}), [f"{m:g}" for m in sorted({r["minutes"] for r in mine})]
        )
        axes[place].minorticks_off()
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend(fontsize=8)
    figure.savefig(file)


if __name__ == "__main__":
    main()
