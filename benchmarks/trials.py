"""Trials on the way to a mask that is as good as fine-tuning: what was tried, on validation images alone.

    python benchmarks/trials.py --data ../shared/data/decathlon-mini \
        --weights ../shared/weights/resnet18-tinyimagenet-64.safetensors --out results/trials.json    # goes on if cut
    python benchmarks/trials.py --table results/trials.json

Every trial has the budget of docs/findings.md: ResNet-18 at 32 px, six epochs of at most 1,000 images, batches of 16,
norms of its own; test images are not read. "val" is the last epoch's accuracy, "refit" that with the head fitted again
(`--refit auto`). Bits are what the domain stores for each weight of the base, the head aside.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal, cast

import torch

import polymask as pm
from polymask.core.method import Images, Stage
from polymask.core.parts import Transform
from polymask.core.survey import Site
from polymask.data.load import load_data
from polymask.methods.affine.method import Affine, AffineTransform
from polymask.methods.baselines import FreeWeights
from polymask.train.recipe import read_method

DOMAINS = ("dtd", "gtsrb", "omniglot", "vgg-flowers", "cifar100")
RECIPE = pm.get_recipe("quick", norms="own", batch_size=16, side=32, resized=36, refit="auto")
TRIALS = {
    "finetune:rate=3e-4": "fine-tuning, at the rate of its search",
    "piggyback-bn:rate=3e-4": "Piggyback with own norms, at the rate of its search",
    "affine-full:rate=1e-3": "the paper's method, at the rate of its search",
    "affine-full:rate=1e-3:scalar_rate=3e-4": "scalars at a third of the rate",
    "affine-full:rate=1e-3:scalar_rate=1e-4": "scalars at a tenth of the rate",
    "affine-full:rate=1e-3:distance=10": "scores ten steps from the threshold: all bits on at first",
    "tuned-signs:rate=3e-4": "half of the epochs fine-tune; their signs start the mask, at a third of the rate",
    "tuned-signs:rate=3e-4:later=1.0:tuning=0.667": "the same with two thirds, and the mask at the whole rate",
    "affine-centred:rate=1e-3": "the mask around its middle, scalars in units of the layer",
    "affine-centred:rate=3e-3": "the same, three times the rate",
    "affine-full:rate=1e-3:head_start=centred:head_rate=5e-4": "a head that begins at 0 on centred features",
    "affine-centred:rate=1e-3:head_start=centred:head_rate=5e-4": "the same, around the mask's middle",
    "affine-centred:rate=3e-3:head_start=centred:head_rate=5e-4": "the same, three times the rate",
    "finetune:rate=3e-4:head_start=centred:head_rate=5e-4": "fine-tuning with such a head",
}


@dataclass(frozen=True, kw_only=True)
class TunedSigns(Affine):
    """Fine-tune, then affine masks that start from the signs of the change: k1 = -α, k2 = 2α, α = mean |Δ|.

    `tuning` is the share of the epochs for the weights, `later` what the rates are multiplied by afterwards, `steps`
    how many steps a score of mean |Δ| is from the threshold.
    """

    stage: Literal["weights", "mask"] = "mask"
    tuning: float = 0.5
    later: float = 1 / 3
    steps: float = 40.0
    step: float = 1e-4

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Stage(self.tuning), Stage(1 - self.tuning, self.later))

    def at_rate(self, rate: float) -> "TunedSigns":
        return replace(self, step=rate * self.later)

    def first_stage(self) -> "TunedSigns":
        return replace(self, stage="weights")

    def transform(self, site: Site) -> Transform:  # type: ignore[override]
        return FreeWeights(site) if self.stage == "weights" else AffineTransform(self, site)

    def next_stage(self, base: pm.Base, domain: pm.Domain, images: Images) -> pm.Domain | None:
        if self.stage == "mask":
            return None
        following = domain.rebuilt(base, replace(self, stage="mask"))
        tuned = dict(domain.named_transforms())
        for name, transform in following.named_transforms():
            change = cast(FreeWeights, tuned[name]).delta.detach()
            size = change.abs().mean()
            scores, k1, k2 = (transform.get_parameter(part) for part in ("scores", "k1", "k2"))
            with torch.no_grad():
                scores.copy_(change / size * self.steps * self.step)
                k1.fill_(-size)
                k2.fill_(2 * size)
        return following


pm.register("tuned-signs", TunedSigns())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of decathlon-mini")
    parser.add_argument("--weights", type=Path, help="those of resnet18-64")
    parser.add_argument("--trials", nargs="+", default=list(TRIALS))
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print what was measured before")
    options = parser.parse_args()
    rows = json.loads(options.table.read_text()) if options.table else measure(options)
    print(table(rows))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All trials that are not in the file yet, each written as soon as it is done."""
    torch.set_num_threads(1)
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {(row["trial"], row["domain"], row["seed"]) for row in rows}
    base = pm.load_base("resnet18-64", weights=options.weights)
    wanted = [(s, d, t) for s in options.seeds for d in options.domains for t in options.trials]
    for seed, domain, trial in wanted:
        if (trial, domain, seed) in done:
            continue
        data = replace(load_data(f"decathlon:{options.data}/{domain}", seed=seed, limit=1000), test=None)
        text = read_method(trial)
        learned = pm.learn(base, data, text.method(RECIPE), text.recipe(RECIPE), seed=seed, progress=False)
        bits = learned.domain.metrics["bits_per_weight"]
        curve = [round(cast(float, record.val_accuracy), 2) for record in learned.history]
        refit = round(learned.domain.metrics["val_accuracy"], 2)
        rows.append(
            {"trial": trial, "domain": domain, "seed": seed, "val": curve, "refit": refit, "bits": round(bits, 3)}
        )
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
        print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each trial: the last epoch's val, and after refitting, by domain and in the mean."""
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    heads = ["trial", "what it tries", *domains, "mean", "bits", "seeds"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for trial in dict.fromkeys(row["trial"] for row in rows):
        mine = [row for row in rows if row["trial"] == trial]
        last, refit = (
            {d: [value(row) for row in mine if row["domain"] == d] for d in domains}
            for value in (lambda row: row["val"][-1], lambda row: row["refit"])
        )
        cells = [f"{mean(last[d]):.1f} / {mean(refit[d]):.1f}" if last[d] else "–" for d in domains]
        whole = all(last.values())
        total = [mean(mean(each[d]) for d in domains) for each in (last, refit)] if whole else []
        cells.append(f"**{total[0]:.1f} / {total[1]:.1f}**" if whole else "–")
        seeds = len({row["seed"] for row in mine})
        lines.append(
            f"| `{trial}` | {TRIALS.get(trial, '')} | " + " | ".join(cells) + f" | {mine[0]['bits']} | {seeds} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
