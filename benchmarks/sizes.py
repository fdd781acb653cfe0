"""How small can a pack be? What 16 bits cost in accuracy, and what the context of a mask's bits would save.

    python benchmarks/sizes.py RUNS… --out results/sizes.json [--methods affine-full,affine-centred]
    python benchmarks/sizes.py --table --out results/sizes.json

RUNS are folders of `polymask benchmark`, with their packs, whose numbers have 32 bits. For each pack of the methods:
test accuracy and bits a weight as it is, and with norms, scalars and head rounded to 16 bits, as `learn` stores them.
For its masks: the bits a weight that an ideal coder would need, if all it knew of a bit were the share of ones in
its layer, in its output channel, in its input channel, or what the three bits before it in its filter are. Shares are
counted at 8 bits each for channels and 16 for layers, so that knowing more is not free.
"""

import argparse
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from kept import mean, read, write

import polymask as pm
from polymask.benchmarks.jobs import CUT_SEED
from polymask.benchmarks.records import PLAN, Plan, read_record
from polymask.core.accounting import bits_per_weight, in_halves
from polymask.data.load import load_data
from polymask.data.loader import loader_at

CONTEXTS = ("layer", "output channel", "input channel", "three bits before")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--methods", default="affine-full,affine-centred")
    parser.add_argument("--weights", type=Path, help="of the base, where it has a file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print what was measured before")
    options = parser.parse_args()
    for runs in options.runs:
        measure(runs, options)
    if options.table:
        print_tables(read(options.out))


def measure(runs: Path, options: argparse.Namespace) -> None:
    """All packs of a benchmark that are not in the file yet."""
    plan = Plan.from_json(read_record(runs / PLAN))
    base = pm.load_base(plan.base, weights=options.weights)
    for name, facts in plan.domains.items():
        data = load_data(facts.source, seed=CUT_SEED)
        if len(data.classes) > facts.classes:
            data = data.first_classes(facts.classes)
        for method in options.methods.split(","):
            for pack in sorted(runs.glob(f"{method}/{name}/seed-*/packs/{name}.safetensors")):
                key = f"{runs.name} {method} {name} {pack.parts[-3]}"
                if key in read(options.out):
                    continue
                domain = pm.load_domain(pack, base)
                if list(data.classes) != domain.classes:
                    raise SystemExit(f"{facts.source} has other classes than {pack}")
                test = loader_at(data.test or data.val, domain.input)
                row: dict[str, Any] = {"runs": runs.name, "method": method, "domain": name, "images": len(test.cache)}
                row["32"] = {"test": pm.evaluate(base, domain, test), "bits": bits_per_weight(base, domain)}
                row["masks"] = contexts(domain)
                domain.restore(in_halves(domain))
                row["16"] = {"test": pm.evaluate(base, domain, test), "bits": bits_per_weight(base, domain)}
                write(options.out, {key: row})
                print(key, row, flush=True)


def contexts(domain: pm.Domain) -> dict[str, float]:
    """Bits a weight of an ideal code of all masks, by what it knows."""
    found = dict.fromkeys(CONTEXTS, 0.0)
    weights = 0
    for _, transform in domain.named_transforms():
        mask = transform.mask()
        if mask is None:
            continue
        bits = mask.reshape(mask.shape[0], mask.shape[1] if mask.dim() > 1 else 1, -1).to(torch.uint8).numpy()
        weights += bits.size
        found["layer"] += 16 + code_length(bits.reshape(1, -1))
        found["output channel"] += 8 * len(bits) + code_length(bits.reshape(len(bits), -1))
        by_input = bits.transpose(1, 0, 2)
        found["input channel"] += 8 * len(by_input) + code_length(by_input.reshape(len(by_input), -1))
        found["three bits before"] += 8 * 16 + by_the_last_three(bits.reshape(len(bits), -1))
    return {name: bits / weights for name, bits in found.items()}


def code_length(rows: np.ndarray) -> float:
    """Bits of rows, each coded by its own share of ones."""
    ones, size = rows.sum(1, dtype=np.int64), rows.shape[1]
    return float(sum(size * entropy(count / size) for count in ones))


def by_the_last_three(rows: np.ndarray) -> float:
    """Bits of rows, each bit coded by the share of ones after the three bits before it."""
    if rows.shape[1] < 4:
        return float(rows.size)
    before = rows[:, :-3] << 2 | rows[:, 1:-2] << 1 | rows[:, 2:-1]
    total = float(3 * len(rows))
    for context in range(8):
        after = rows[:, 3:][before == context]
        total += after.size * entropy(float(after.mean())) if after.size else 0.0
    return total


def entropy(share: float) -> float:
    """In bits, of a bit that is one with this probability."""
    return 0.0 if share in (0.0, 1.0) else -share * math.log2(share) - (1 - share) * math.log2(1 - share)


def print_tables(rows: dict[str, Any]) -> None:
    """Means over seeds by domain; then over domains."""
    runs = list(rows.values())
    for method in dict.fromkeys(row["method"] for row in runs):
        mine = [row for row in runs if row["method"] == method]
        print(f"| `{method}` | packs | test, 32 bits | test, 16 bits | lost | bits a weight, 32 | bits a weight, 16 |")
        print("|---|---|---|---|---|---|---|")
        means = []
        for key in dict.fromkeys((row["runs"], row["domain"]) for row in mine):
            its = [row for row in mine if (row["runs"], row["domain"]) == key]
            means.append([fmean(row[p][what] for row in its) for what in ("test", "bits") for p in ("32", "16")])
            print(line(key[1], str(len(its)), means[-1]))
        print(line("mean of domains", str(len(mine)), [fmean(column) for column in zip(*means, strict=True)]))
        print()
    print(f"| bits a weight of masks, coded by the share of ones in … | {' | '.join(CONTEXTS)} |")
    print("|---" * (len(CONTEXTS) + 1) + "|")
    for method, name in dict.fromkeys((row["method"], row["runs"]) for row in runs):
        its = [row["masks"] for row in runs if (row["method"], row["runs"]) == (method, name)]
        print(f"| `{method}`, {name} | {' | '.join(mean((row[c] for row in its), 4) for c in CONTEXTS)} |")


def line(name: str, packs: str, numbers: list[float]) -> str:
    exact, rounded, bits, fewer = numbers
    cells = [name, packs, f"{exact:.2f}", f"{rounded:.2f}", f"{exact - rounded:+.2f}", f"{bits:.3f}", f"{fewer:.3f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
