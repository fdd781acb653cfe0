"""How the recipe `quick` was found: variants of it on one domain, compared on val, never on test.

    python benchmarks/quick_recipe.py --data DIR --out results/quick-recipe.json
        [--limit 1200] [--only NAME …] [--part 0/2] [--threads 1]

Each variant changes some fields of the recipe. Finished variants are kept and skipped, so parts may run
in parallel while the file grows.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import polymask as pm
from polymask.data.load import load_data
from polymask.train.learn import learn, make_loaders
from polymask.train.recipe import get_recipe

START = {
    "epochs": 5,
    "side": 96,
    "rate": 5e-4,
    "head_optimiser": "adam",
    "head_rate": 2e-3,
    "schedule": "cosine",
    "warmup": 0.2,
    "crop_scale": (0.35, 1.0),
    "norms": None,
}
VARIANTS: dict[str, dict] = {
    "own norms": {},
    "own norms, re-estimated": {"norm_reestimate": True},
    "shared norms": {"norms": "shared"},
    "affine norms": {"norms": "affine"},
    "shared norms, rate 2e-4": {"norms": "shared", "rate": 2e-4},
    "shared norms, rate 1e-3": {"norms": "shared", "rate": 1e-3},
    "affine norms, rate 1e-4": {"norms": "affine", "rate": 1e-4},
    "affine norms, rate 1e-3": {"norms": "affine", "rate": 1e-3},
    "affine norms, rate 2e-3": {"norms": "affine", "rate": 2e-3},
    "affine norms, warm-up 1": {"norms": "affine", "warmup": 1.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="training images")
    parser.add_argument("--method", default="affine-full")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    base, data = pm.load_base("efficientnet-lite0"), load_data(options.data, limit=options.limit)
    part, parts = map(int, options.part.split("/"))
    for name in options.only[part::parts]:
        if name in read(options.out):
            continue
        recipe = get_recipe("quick", **(START | VARIANTS[name]))
        loaders = make_loaders(data, base.input, recipe)
        begin = time.perf_counter()
        learned = learn(base, data, options.method, recipe, loaders=loaders)
        row = {
            "method": options.method,
            "changed": VARIANTS[name],
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
