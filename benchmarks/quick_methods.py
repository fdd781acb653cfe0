"""Five methods with the recipe `quick` on one domain, several seeds, each with its best norms.

    python benchmarks/quick_methods.py --data DIR --out results/quick-methods.json
        [--part 0/2] [--threads 1]

The warm-up and the rate of whole weights are those that `quick` had when this was measured, 0.2 epochs and 1e-4.

A method's choices are compared on val with the first seed; the best one is used for all
seeds. Finished runs are kept and skipped. `--table` prints the result.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import polymask as pm
from polymask.data.load import load_data
from polymask.train.learn import learn, make_loaders
from polymask.train.recipe import get_recipe

# A method's choices: its norms and, if `quick` was not found with it, its rate. What Piggyback and
# classifier-only do to norms is part of their definition.
CHOICES: dict[str, list[tuple[str, dict]]] = {
    "affine-full": [("affine", {}), ("shared", {})],
    "finetune": [("affine", {}), ("shared", {}), ("affine", {"weight_rate": 3e-4})],
    "piggyback": [("shared", {}), ("shared", {"rate": 1e-4})],
    "piggyback-bn": [("own", {}), ("affine", {}), ("affine", {"rate": 1e-4})],
    "classifier-only": [("shared", {})],
}
SEEDS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print_table(read(options.out))
        return
    torch.set_num_threads(options.threads)
    base, data = pm.load_base("efficientnet-lite0"), load_data(options.data)
    part, parts = map(int, options.part.split("/"))
    for method in list(CHOICES)[part::parts]:
        for seed in SEEDS:
            choices = CHOICES[method]
            if seed != SEEDS[0]:
                choices = [choices[best(read(options.out), method)]]
            for norms, changes in choices:
                choice = CHOICES[method].index((norms, changes))
                name = f"{method} {choice} {seed}"
                if name in read(options.out):
                    continue
                recipe = get_recipe("quick", **({"warmup": 0.2, "weight_rate": 1e-4} | changes))
                loaders = make_loaders(data, base.input, recipe, seed=seed)
                begin = time.perf_counter()
                learned = learn(base, data, method, recipe, loaders=loaders, seed=seed, norms=norms)
                row = {
                    "method": method,
                    "choice": choice,
                    "norms": norms,
                    "changes": changes,
                    "seed": seed,
                    "val_accuracy": [record.val_accuracy for record in learned.history],
                    "best_val_accuracy": learned.domain.metrics["val_accuracy"],
                    "test_accuracy": learned.test_accuracy,
                    "bits_per_weight": learned.domain.metrics["bits_per_weight"],
                    "seconds": round(time.perf_counter() - begin, 1),
                    "recipe": recipe.to_json(),
                }
                options.out.write_text(json.dumps(read(options.out) | {name: row}, indent=1) + "\n")
                print(f"{row['test_accuracy']:6.2f}  {row['seconds']:6.1f} s  {name}", flush=True)


def best(rows: dict, method: str) -> int:
    """The choice with the best val accuracy of the first seed."""
    mine = [r for r in rows.values() if r["method"] == method and r["seed"] == SEEDS[0]]
    return max(mine, key=lambda row: row["best_val_accuracy"])["choice"]


def print_table(rows: dict) -> None:
    """Print one line per method: test accuracy over the seeds of its best choice."""
    print("| method | norms | changed in `quick` | test accuracy, mean ± s.d. | seeds |")
    print("|---|---|---|---|---|")
    for method in CHOICES:
        choice = best(rows, method)
        mine = [r for r in rows.values() if (r["method"], r["choice"]) == (method, choice)]
        scores = [row["test_accuracy"] for row in mine]
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        norms, changes = CHOICES[method][choice]
        changed = ", ".join(f"{name} {value:g}" for name, value in changes.items()) or "nothing"
        score = f"{statistics.mean(scores):.2f}{spread}"
        print(f"| {method} | {norms} | {changed} | {score} | {len(scores)} |")


def read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    main()
