"""Runs of a benchmark that nobody ran: plans and outcomes as the runner writes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from polymask.benchmarks.records import DomainFacts, DomainOutcome, LayerStatistics, Outcome, Plan, Runs
from polymask.benchmarks.tables import ResultTable, tabulate

SKETCH = {"cubs": 77.0, "stanford-cars": 81.0, "flowers": 93.0}
DECATHLON = {
    "aircraft": 48.0,
    "cifar100": 78.0,
    "daimlerpedcls": 92.0,
    "dtd": 52.0,
    "gtsrb": 97.0,
    "vgg-flowers": 80.0,
    "omniglot": 85.0,
    "svhn": 95.0,
    "ucf101": 46.0,
}
ABLATION = (
    *("piggyback-star", "piggyback-star-bn", "piggyback-star-bn-k1"),
    *("affine-simple-no-k1", "affine-simple-sigmoid", "affine-full-no-k1", "affine-full-no-k2"),
    *("affine-full-sigmoid", "affine-full-channel"),
)


@dataclass(frozen=True)
class Made:
    """How a method does: points above or below a domain's level, and what it keeps."""

    points: float
    bits: float  # a weight
    together: bool = False
    forgets: float = 0.0  # points, for each domain that is learned later
    moves: bool = False
    masks: bool = False
    flips: float = 0.4  # share of the masks' bits


METHODS = {
    "classifier-only": Made(-22, 0.0),
    "bn-only": Made(-9, 0.06),
    "finetune": Made(0, 32.0),
    "piggyback": Made(-5, 1.0, masks=True, flips=0.2),
    "piggyback-bn": Made(-2, 1.06, masks=True, flips=0.2),
    "affine-simple": Made(-0.6, 1.07, masks=True),
    "affine-full": Made(-0.4, 1.07, masks=True),
    "ba2": Made(-2.5, 0.07),
    "bitdelta": Made(-1.2, 1.03),
    "parallel-adapter": Made(-0.8, 3.6),
    "packnet": Made(-4, 0.6, together=True, moves=True),
    "ewc": Made(-1, 0.0, together=True, forgets=9.0, moves=True),
}


def make_plan(
    domains: Sequence[str] = tuple(SKETCH),
    methods: Sequence[str] = tuple(METHODS),
    seeds: Sequence[int] = (0, 1, 2),
    **changes: Any,
) -> Plan:
    """A plan of ImageNet-to-Sketch, on less than all of it."""
    values: dict[str, Any] = {
        "benchmark": "imagenet-to-sketch",
        "base": "efficientnet-lite0",
        "fingerprint": "3f" * 32,
        "parameters": 3_371_024,
        "methods": tuple(methods),
        "seeds": tuple(seeds),
        "recipe": {"name": "imagenet-to-sketch", "epochs": 6, "milestones": [4], "lr": 1e-3},
        "selection": "val",
        "crops": "1",
        "domains": {
            name: DomainFacts(f"sketch:data/{name}", 102, 2040, 510, 6149, ("half of train",)) for name in domains
        },
        "own": "imagenet",
        "own_accuracy": 75.5,
        "deviations": (
            "without WikiArt, Sketch: scores are not those of the benchmark",
            "base efficientnet-lite0; the paper has torchvision:resnet50",
        ),
        "command": "polymask benchmark imagenet-to-sketch --data data --methods affine-full",
        "environment": {"polymask": "0.1", "torch": "2.13.0"},
    }
    return Plan(**{**values, **changes})


def make_domain(accuracy: float | None, **changes: Any) -> DomainOutcome:
    """What a method reached on a domain."""
    values: dict[str, Any] = {
        "test_accuracy": accuracy,
        "learned": accuracy,
        "val_accuracy": accuracy,
        "epochs": (),
        "pack_bytes": 500_000,
        "bits_per_weight": 1.0,
        "components": {"mask": 3_000_000, "head": 40_000},
        "layers": (),
    }
    return DomainOutcome(**{**values, **changes})


def make_outcome(
    method: str,
    accuracies: Mapping[str, float | None],
    seed: int = 0,
    direction: str = "",
    params: float = 1.1,
    base_after: Mapping[str, float | None] | None = None,
) -> Outcome:
    """A job's result with these test accuracies."""
    return Outcome(
        method=method,
        registered=method.partition(":")[0],
        options={},
        seed=seed,
        direction=direction,
        domains={name: make_domain(accuracy) for name, accuracy in accuracies.items()},
        base_after=base_after,
        params_paper=params,
        params_stored=params + 0.01,
        seconds=100.0,
    )


def make_runs(levels: Mapping[str, float] = SKETCH, still: Sequence[str] = (), **changes: Any) -> Runs:
    """Three seeds of twelve methods, PackNet and EWC in both directions; some with still masks."""
    plan = make_plan(tuple(levels), **changes)
    jobs = []
    for method in plan.methods:
        made = METHODS.get(method, Made(-1.5, 1.07, masks=True))
        made = replace(made, flips=2e-5) if method in still else made
        for seed in plan.seeds:
            if made.together:
                jobs += [_job(plan, levels, method, made, seed, d) for d in ("down", "up")]
            else:
                jobs += [_job(plan, {n: levels[n]}, method, made, seed, "") for n in levels]
    return Runs(plan, tuple(jobs))


def write_runs(runs: Runs, folder: Path) -> Path:
    """Put runs on disk where the runner puts them."""
    runs.plan.write(folder)
    for outcome in runs.outcomes:
        part = f"together-{outcome.direction}" if outcome.direction else next(iter(outcome.domains))
        place = folder / outcome.method.replace(":", "+") / part / f"seed-{outcome.seed}"
        outcome.write(place)
    return folder


def _job(plan: Plan, levels: Mapping[str, float], method: str, made: Made, seed: int, direction: str) -> Outcome:
    random = Random(f"{method} {direction} {seed} {sorted(levels)}")
    order = list(levels) if direction != "up" else list(levels)[::-1]
    domains = {}
    for place, name in enumerate(order):
        learned = min(99.0, levels[name] + made.points + random.gauss(0, 0.4))
        lost = made.forgets * (len(order) - 1 - place)
        domains[name] = make_domain(
            max(2.0, learned - lost),
            learned=learned,
            pack_bytes=int(4e5 * (made.bits + 0.3)),
            bits_per_weight=made.bits,
            epochs=_epochs(learned, random),
            layers=_layers(method, random) if made.masks else (),
            flipped=int(3_300_000 * made.flips * random.uniform(0.9, 1)) if made.masks else None,
            masked=3_300_000 if made.masks else None,
        )
    after = None
    if made.moves:
        kept = 74.0 if method == "packnet" else 41.0 + random.gauss(0, 2)
        after = {"change": 0.2, "agreement": 80.0, "accuracy_before": 75.5, "accuracy_after": kept}
    size = 1 + made.bits * len(plan.domains) / 32
    return Outcome(
        *(method, method, {}, seed, direction, domains, after),
        params_paper=size,
        params_stored=size + 0.004,
        seconds=300 + 40 * random.random(),
    )


def _epochs(end: float, random: Random) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "epoch": epoch,
            "loss": 2.4 / (epoch + 1) + 0.05 * random.random(),
            "train_accuracy": end - 18 / (epoch + 1),
            "val_accuracy": end - 24 / (epoch + 1) ** 1.5,
        }
        for epoch in range(6)
    )


def _layers(method: str, random: Random) -> tuple[LayerStatistics, ...]:
    found = []
    for depth in range(20):
        full = method.startswith("affine")
        density = random.gauss(0.51, 0.01) if full else 0.85 - 0.015 * depth + random.gauss(0, 0.02)
        grows = 0.002 * (1 + depth / 3)
        k1, k2 = (-grows * random.random(), 2 * grows * random.random()) if full else (0.0, 0.0)
        k3 = 1.5 * grows * random.gauss(0, 1) if full else 1.0
        kind = "conv" if depth == 0 else ("depthwise", "pointwise")[depth % 2]
        found.append(LayerStatistics(f"b.{depth}.weight", kind, depth, 900 + 50 * depth, density, k1, k2, k3))
    return tuple(found)


TWO = ("birds", "cars")


def alone(method: str, accuracies: Mapping[str, Sequence[float]], **changes: Any) -> list[Outcome]:
    """A job for each domain and seed, with these accuracies by seed."""
    return [
        make_outcome(method, {domain: value}, seed, **changes)
        for domain, values in accuracies.items()
        for seed, value in enumerate(values)
    ]


def table_of(outcomes: Sequence[Outcome], **changes: Any) -> ResultTable:
    """A table of two domains and the methods that there are results of."""
    methods = tuple(dict.fromkeys(outcome.method for outcome in outcomes))
    seeds = tuple(sorted({outcome.seed for outcome in outcomes}))
    plain = {"benchmark": "zoo", "own": None, "own_accuracy": None}
    return tabulate(Runs(make_plan(TWO, methods, seeds, **(plain | changes)), tuple(outcomes)))


def individual(a: float = 90, b: float = 80) -> list[Outcome]:
    return alone("finetune", {"birds": [a], "cars": [b]}, params=3.0)
