"""How the recipe `quick` was found: variants of it on one domain, compared on val, never on test.

    python benchmarks/quick_recipe.py --data DIR --out results/quick-recipe.json
        [--part 0/2] [--threads 1]

Each variant changes some fields of the recipe or options of the method. What is done is kept and
skipped, so parts may run side by side and the file grows.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import polymask as pm
from polymask.data import load_data
from polymask.learn import learn, make_loaders
from polymask.recipes import get_recipe

START = {
    "epochs": 5,
    "side": 96,
    "rate": 5e-4,
    "head_optimiser": "adam",
    "head_rate": 2e-3,
    "schedule": "cosine",
    "warmup": 0.2,
    "crop_scale": (0.35, 1.0),
}
VARIANTS: dict[str, tuple[str, dict, dict]] = {
    "start: own norms": ("affine-full", {}, {}),
    "own norms, momentum 0.1": ("affine-full", {"norm_momentum": 0.1}, {}),
    "own norms, re-estimated": (
        "affine-full",
        {"norm_momentum": 0.1, "norm_reestimate": True},
        {},
    ),
    "shared norms": ("affine-full", {"norms": "shared"}, {}),
    "affine norms": ("affine-full", {"norms": "affine"}, {}),
    "affine norms, rate 1e-4": ("affine-full", {"norms": "affine", "rate": 1e-4}, {}),
    "affine norms, rate 2e-4": ("affine-full", {"norms": "affine", "rate": 2e-4}, {}),
    "affine norms, rate 1e-3": ("affine-full", {"norms": "affine", "rate": 1e-3}, {}),
    "affine norms, head rate 5e-3": ("affine-full", {"norms": "affine", "head_rate": 5e-3}, {}),
    "affine norms, wide crops": (
        "affine-full",
        {"norms": "affine", "crop_scale": (0.08, 1.0)},
        {},
    ),
    "affine norms, batch 16": ("affine-full", {"norms": "affine", "batch_size": 16}, {}),
    "affine norms, smoothing 0.1": (
        "affine-full",
        {"norms": "affine", "label_smoothing": 0.1},
        {},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    base, data = pm.load_base("efficientnet-lite0"), load_data(options.data)
    part, parts = map(int, options.part.split("/"))
    for name in list(VARIANTS)[part::parts]:
        if name in read(options.out):
            continue
        method, fields, chosen = VARIANTS[name]
        recipe = get_recipe("quick", **(START | fields))
        loaders = make_loaders(data, base.input, recipe)
        begin = time.perf_counter()
        learned = learn(base, data, method, recipe, loaders=loaders, **chosen)
        row = {
            "method": method,
            "changed": fields | chosen,
            "val_accuracy": [record.val_accuracy for record in learned.history],
            "best_val_accuracy": learned.domain.metrics["val_accuracy"],
            "seconds": round(time.perf_counter() - begin, 1),
        }
        options.out.write_text(json.dumps(read(options.out) | {name: row}, indent=1) + "\n")
        print(f"{row['best_val_accuracy']:6.2f}  {row['seconds']:6.1f} s  {name}", flush=True)


def read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    main()
