"""Trials on the way to a mask that is as good as fine-tuning: what was tried, on validation images alone.

    python benchmarks/trials.py --data ../shared/data \
        --weights ../shared/weights/resnet18-tinyimagenet-64.safetensors --out results/trials.json    # goes on if cut
    python benchmarks/trials.py --table --out results/trials.json

Every trial has the budget of docs/findings.md, and the default recipe at the side of training: a head that begins
centred and is fitted again. On domains of the decathlon it is a ResNet-18 at 32 px, six epochs of at most 1,000 images,
batches of 16, own norms; on those of ImageNet-to-Sketch EfficientNet-Lite0 at 64 px, five epochs of at most 2,048
images (of 100 classes of Cars), batches of 32, norms with the base's statistics. Test images are not read.
"val" is the last epoch's accuracy, "refit" that with the head fitted again. Bits are what the domain stores for each
weight of the base, the head aside.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any, Literal, cast

import torch

import polymask as pm
from polymask.core.bits import Bits
from polymask.core.method import Images, Objective, Stage
from polymask.core.parts import Transform
from polymask.core.survey import Site
from polymask.data.images import limited
from polymask.data.load import load_data
from polymask.methods.affine.formula import affine
from polymask.methods.affine.method import GAIN, Affine, AffineTransform
from polymask.methods.baselines import FreeWeights
from polymask.train.recipe import read_method

STANDARD = pm.get_recipe("standard", test_side=None, refit_on_val=None)
SMALL = {"norms": "own", "batch_size": 16, "side": 32, "resized": 36, "epochs": 6}
SETTINGS = {
    "decathlon": ("ResNet-18, 32 px", pm.get_recipe(STANDARD, **SMALL), 1000),
    "sketch": ("EfficientNet-Lite0, 64 px", pm.get_recipe(STANDARD, side=64, epochs=5), 2048),
}  # a title, the recipe, and training images at most
DOMAINS = {"decathlon": ("dtd", "gtsrb"), "sketch": ("flowers", "cars")}
TRIALS = {
    "finetune:rate=3e-4": "fine-tuning, at the rate of its search",
    "finetune:rate=3e-4:head_rate=5e-4": "fine-tuning with a head that learns faster",
    "affine-full:rate=3e-4": "the paper's method",
    "affine-full:rate=1e-3": "the paper's method",
    "affine-centred:rate=1e-3": "the mask around its middle, scalars in units of the layer",
    "affine-centred:rate=3e-3": "the mask around its middle, scalars in units of the layer",
    "affine-centred:rate=1e-2": "the mask around its middle, scalars in units of the layer",
    "affine-centred:rate=3e-3:head_rate=5e-4": "around its middle, with a head that learns faster",
    "weight-signs:rate=3e-3": "around its middle, and bits begin as signs of W, ten steps from the threshold",
    "weight-signs:rate=3e-3:steps=3.0": "signs of W, three steps from the threshold",
    "weight-signs:rate=3e-3:weighed=true": "signs of W, ten steps for a weight of mean size, more for a larger one",
    "slow-scale:rate=1e-3": "around its middle, and the scale α0 learns at a tenth",
    "slow-scale:rate=3e-3": "around its middle, and the scale α0 learns at a tenth",
    "affine-centred:rate=3e-3:per=channel": "scalars of each channel",
    "affine-centred:rate=1e-3:norms=own:norm_momentum=0.1": "around its middle, and norms with own statistics",
    "affine-centred:rate=3e-3:norms=own:norm_momentum=0.1": "around its middle, and norms with own statistics",
    "affine-centred:rate=1e-3:norms=own:norm_momentum=0.1:norm_reestimate=true": "and statistics gathered at the end",
    "affine-centred:rate=3e-3:norms=affine": "around its middle, and norms with the base's statistics",
    "affine-full:rate=1e-3:distance=10": "the paper's, scores ten steps from the threshold: all bits on at first",
    "affine-full:rate=1e-3:scalar_rate=1e-4": "the paper's, scalars at a tenth of the rate",
    "tuned-signs:rate=3e-4": "half of the epochs fine-tune; their signs start the mask, at a third of the rate",
    "tuned-signs:rate=3e-4:later=1.0:tuning=0.667": "the same with two thirds, and the mask at the whole rate",
    "tuned-signs:rate=3e-4:later=1.0:teaching=1.0": "half fine-tunes, which then teaches the mask, at the whole rate",
    "fading:rate=3e-4": "fine-tuning that fades into its signs and one size a layer",
    "fading:rate=1e-3": "fine-tuning that fades into its signs and one size a layer",
    "averaged:rate=1e-3": "around its middle, bits of scores that are averaged over steps",
    "averaged:rate=3e-3": "around its middle, bits of scores that are averaged over steps",
    "two-bits:rate=1e-3": "around its middle, two bits for the half of the weights next to the head, none for others",
    "two-bits:rate=3e-3": "around its middle, two bits for the half of the weights next to the head, none for others",
    "two-bits:rate=1e-3:half=first": "two bits for the half of the weights next to the images, none for others",
    "two-bits:rate=3e-3:half=first": "two bits for the half of the weights next to the images, none for others",
}


@dataclass(frozen=True, kw_only=True)
class WeightSigns(Affine):
    """Bits that begin as signs of W, which is nearly a scale of W, where bits at random would be noise.

    A score begins `steps` steps from the threshold, so what no gradient asks for stays as it is. `weighed`: so many
    for a weight of mean size, and in proportion to its size for others.
    """

    k0: Literal["learned"] = "learned"
    form: Literal["centred"] = "centred"
    steps: float = 10.0
    weighed: bool = False
    step: float = 1e-4

    def at_rate(self, rate: float) -> "WeightSigns":
        return replace(self, step=rate)

    def transform(self, site: Site) -> "WeightSignsTransform":
        return WeightSignsTransform(self, site)


class WeightSignsTransform(AffineTransform):
    """One site's; see `WeightSigns`."""

    def __init__(self, method: WeightSigns, site: Site) -> None:
        super().__init__(method, site)
        self.distance, self.weighed, self.starts_on = method.steps * method.step, method.weighed, False

    def begin(self, base_weight: torch.Tensor) -> None:
        super().begin(base_weight)
        if self.scores is not None and not base_weight.is_meta:
            signs = base_weight / base_weight.abs().mean() if self.weighed else base_weight.sign()
            with torch.no_grad():
                self.scores.copy_(self.at + self.distance * signs)


@dataclass(frozen=True, kw_only=True)
class SlowScale(Affine):
    """Around its middle, with α0 = 1 + a0 instead of g a0: under frozen statistics no norm undoes a scale."""

    k0: Literal["learned"] = "learned"
    form: Literal["centred"] = "centred"
    scores: tuple[float, float] = (-1e-4, 1e-4)

    def transform(self, site: Site) -> "SlowScaleTransform":
        return SlowScaleTransform(self, site)


class SlowScaleTransform(AffineTransform):
    """One site's; see `SlowScale`."""

    def _around_the_middle(self, a0: Any, a1: Any, a2: Any, a3: Any) -> list[Any]:
        start = 1 / GAIN
        return super()._around_the_middle(start + (a0 - start) / GAIN, a1, a2, a3)


@dataclass(frozen=True, kw_only=True)
class TunedSigns(Affine):
    """Fine-tune, then affine masks that start from the signs of the change: k1 = -α, k2 = 2α, α = mean |Δ|.

    `tuning` is the share of the epochs for the weights, `later` what the rates are multiplied by afterwards, `steps`
    how many steps a score of mean |Δ| is from the threshold. `teaching` weighs what features of the mask's network
    have to be like: those of the weights' network, as a mean square relative to theirs.
    """

    stage: Literal["weights", "mask"] = "mask"
    tuning: float = 0.5
    later: float = 1 / 3
    steps: float = 40.0
    step: float = 1e-4
    teaching: float = 0.0

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Stage(self.tuning), Stage(1 - self.tuning, self.later))

    def at_rate(self, rate: float) -> "TunedSigns":
        return replace(self, step=rate * self.later)

    def together(self, base: pm.Base, domain: pm.Domain, out: Any = None) -> Any:
        return {} if self.stage == "weights" else super().together(base, domain, out)

    def first_stage(self) -> "TunedSigns":
        return replace(self, stage="weights")

    def transform(self, site: Site) -> Transform:  # type: ignore[override]
        return FreeWeights(site) if self.stage == "weights" else AffineTransform(self, site)

    def next_stage(self, base: pm.Base, domain: pm.Domain, images: Images) -> pm.Domain | None:
        if self.stage == "mask":
            return None
        following = domain.rebuilt(base, replace(self, stage="mask"))
        following.__dict__["teacher"] = domain  # no part of it
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

    def objective(self, base: pm.Base, domain: pm.Domain, images: Images) -> Objective | None:
        teacher = domain.__dict__.get("teacher")
        return Teaching(self.teaching, base, teacher) if self.teaching and teacher is not None else None


class Teaching(Objective):
    """How far features are from a teacher's, relative to the size of these."""

    def __init__(self, weight: float, base: pm.Base, teacher: pm.Domain) -> None:
        super().__init__()
        self.weight = weight
        self.taught = [base, teacher.eval()]  # a list keeps them out of what learns

    def forward(self, images: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        base, teacher = self.taught
        with torch.no_grad():
            wanted = teacher.features(base, images)
        return self.weight * (features - wanted).square().mean() / wanted.square().mean()


class Steps(Objective):
    """Adds nothing to the loss; tells transforms after each step which share of all steps is done."""

    def __init__(self, total: int, told: list[Callable[[float], None]]) -> None:
        super().__init__()
        self.total, self.told, self.done = total, told, 0

    def forward(self, images: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        self.done += 1
        for tell in self.told:
            tell(self.done / self.total)
        return features.new_zeros(())


@dataclass(frozen=True, kw_only=True)
class Stepwise(Affine):
    """A mask whose transforms follow how far training is; `total` is the number of its steps, by hand."""

    total: int = 0

    def objective(self, base: pm.Base, domain: pm.Domain, images: Images) -> Objective:
        return Steps(self.total, [cast(Any, transform).follow for _, transform in domain.named_transforms()])


@dataclass(frozen=True, kw_only=True)
class Fading(Stepwise):
    """W + D + λ (a sign D - D), a = mean |D|: fine-tuning for λ = 0, one bit a weight for λ = 1.

    The gradient goes straight to D. λ rises from 0 to 1 between a fifth and seven tenths of the steps.
    """

    def transform(self, site: Site) -> "FadingTransform":
        return FadingTransform(self, site)


class FadingTransform(AffineTransform):
    """One site's; its scores are D."""

    def __init__(self, method: Fading, site: Site) -> None:
        super().__init__(method, site)
        self.faded = 0.0
        with torch.no_grad():
            cast(torch.Tensor, self.scores).zero_()

    def follow(self, progress: float) -> None:
        self.faded = min(max((progress - 0.2) / 0.5, 0.0), 1.0)

    def weight(self, base_weight: torch.Tensor) -> torch.Tensor:
        if self.scores is None:
            return super().weight(base_weight)
        signs = torch.where(self.scores >= 0, 1.0, -1.0) * self.scores.abs().mean()
        return base_weight + self.scores + self.faded * (signs - self.scores).detach()

    def coefficients(self) -> list[torch.Tensor | float]:
        if self.scores is None:
            return super().coefficients()
        size = self.scores.detach().abs().mean()
        return [1.0, -size, 2 * size, 0.0]


@dataclass(frozen=True, kw_only=True)
class Averaged(Stepwise):
    """Around its middle; after training the mask is that of scores averaged over the last tenth of all steps or so."""

    k0: Literal["learned"] = "learned"
    form: Literal["centred"] = "centred"
    scores: tuple[float, float] = (-1e-4, 1e-4)

    def transform(self, site: Site) -> "AveragedTransform":
        return AveragedTransform(self, site)


class AveragedTransform(AffineTransform):
    """One site's; outside of training its scores are their average."""

    def __init__(self, method: Averaged, site: Site) -> None:
        super().__init__(method, site)
        self.share = min(1.0, 10 / max(1, method.total))
        self.average: torch.Tensor | None = None

    def follow(self, progress: float) -> None:
        now = cast(torch.Tensor, self.scores).detach()
        self.average = now.clone() if self.average is None else self.average.lerp_(now, self.share)

    def weight_by(self, base_weight: torch.Tensor, ks: Any) -> torch.Tensor:
        if self.training or self.average is None or self.scores is None:
            return super().weight_by(base_weight, ks)
        return affine(base_weight, self.mask_of(self.average).to(self.average.dtype), *ks)

    def mask(self) -> torch.Tensor:
        return super().mask() if self.average is None or self.scores is None else self.mask_of(self.average)


@dataclass(frozen=True, kw_only=True)
class TwoBits(Affine):
    """Around its middle, with four steps instead of two, for half of a base's weights; the others are the base's.

    `half` is the one next to the images or the one next to the head; `chosen` are its sites, by hand.
    """

    k0: Literal["learned"] = "learned"
    form: Literal["centred"] = "centred"
    scores: tuple[float, float] = (-1e-4, 1e-4)
    half: Literal["first", "last"] = "last"
    chosen: tuple[str, ...] = ()
    step: float = 1e-4

    def at_rate(self, rate: float) -> "TwoBits":
        return replace(self, step=rate)

    def of(self, base: pm.Base) -> "TwoBits":
        """With the sites of its half: whole ones, so it is as near to a half as they allow."""
        sizes = {name: base.tensor(name).numel() for name in base.sites}
        names = list(sizes) if self.half == "first" else list(sizes)[::-1]
        done = list(accumulate(sizes[name] for name in names))
        count = min(range(len(done)), key=lambda n: abs(done[n] - done[-1] / 2)) + 1
        return replace(self, chosen=tuple(names[:count]))

    def together(self, base: pm.Base, domain: pm.Domain, out: Any = None) -> Any:
        return {}

    def transform(self, site: Site) -> "TwoBitsTransform | None":  # type: ignore[override]
        return TwoBitsTransform(self, site) if site.name in self.chosen else None


class TwoBitsTransform(AffineTransform):
    """One site's: a mask for the side of the middle, and one for how far from it, which is once or three times.

    A step is as wide as ten of those by which a score learns, and the gradient goes straight through all of them.
    """

    components = dict(AffineTransform.components) | {"far": "mask"}
    refillable = False

    def __init__(self, method: TwoBits, site: Site) -> None:
        super().__init__(method, site)
        self.width = 10 * method.step
        self.far: Bits | None = None

    def weight(self, base_weight: torch.Tensor) -> torch.Tensor:
        k0, k1, k2, k3 = self.coefficients()
        on = self.mask().to(self.dtype)
        M = on + self.far_bits().to(self.dtype) * (2 * on - 1)
        if self.scores is not None:
            M = M + (self.scores - self.scores.detach())
        return affine(base_weight.view(self.view_shape), M.view(self.view_shape), k0, k1, k2, k3).view(self.shape)

    def write(self, base_weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return Transform.write(self, base_weight, out)

    def far_bits(self) -> torch.Tensor:
        """Which weights are three times as far from the middle: -1, 0, 1, 2 instead of 0 and 1."""
        if self.scores is not None:
            return (self.scores.detach() - self.at).abs() >= self.width
        return cast(Bits, self.far).unpack()

    def stored(self) -> Any:
        return super().stored() | {"far": Bits.of(self.far_bits())}

    def restore(self, stored: Any) -> None:
        self.far = stored["far"]
        super().restore({name: value for name, value in stored.items() if name != "far"})


pm.register("averaged", Averaged())
pm.register("fading", Fading())
pm.register("tuned-signs", TunedSigns())
pm.register("two-bits", TwoBits())
pm.register("weight-signs", WeightSigns())
pm.register("slow-scale", SlowScale())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of sketch-mini and decathlon-mini")
    parser.add_argument("--weights", type=Path, help="those of resnet18-64")
    parser.add_argument("--trials", nargs="+", default=list(TRIALS))
    parser.add_argument("--domains", nargs="+", default=[d for domains in DOMAINS.values() for d in domains])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print what was measured before")
    options = parser.parse_args()
    rows = json.loads(options.out.read_text()) if options.table else measure(options)
    print(table(rows))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All trials that are not in the file yet, each written as soon as it is done."""
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {(row["trial"], row["domain"], row["seed"]) for row in rows}
    wanted = [(t, d, s) for s in options.seeds for t in options.trials for d in options.domains]
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        jobs = [pool.submit(tried, options.data, options.weights, *job) for job in wanted if job not in done]
        for job in as_completed(jobs):
            if job.exception() is not None:
                pool.shutdown(cancel_futures=True)
            rows.append(job.result())
            options.out.write_text(json.dumps(sorted(rows, key=partial(place_of, wanted)), indent=1) + "\n")
            print(rows[-1], flush=True)
    return rows


def place_of(wanted: list[tuple[str, str, int]], row: dict[str, Any]) -> int:
    """Where a row belongs, whichever was done first; those of before come first."""
    job = (row["trial"], row["domain"], row["seed"])
    return wanted.index(job) if job in wanted else -1


def tried(folder: Path, weights: Path, trial: str, domain: str, seed: int) -> dict[str, Any]:
    """One trial on one domain."""
    torch.set_num_threads(1)
    setting = setting_of(domain)
    base = pm.load_base("efficientnet-lite0") if setting == "sketch" else pm.load_base("resnet18-64", weights=weights)
    _, recipe, limit = SETTINGS[setting]
    data = load_data(f"{setting}:{folder}/{setting}-mini/{domain}", seed=seed)
    if domain == "cars":
        data = data.first_classes(100)
    data = replace(data, test=None, train=limited(data.train, limit, seed, domain))
    text = read_method(trial)
    method = text.method(recipe)
    recipe = text.recipe(recipe)
    if isinstance(method, Stepwise):
        method = replace(method, total=recipe.epochs * ceil(len(data.train) / recipe.batch_size))
    if isinstance(method, TwoBits):
        method = method.of(base)
    if isinstance(method, Fading):  # before its last epochs it is none of a mask
        recipe = replace(recipe, selection="last")
    learned = pm.learn(base, data, method, recipe, seed=seed, progress=False)
    metrics = learned.domain.metrics
    curve = [round(cast(float, record.val_accuracy), 2) for record in learned.history]
    found = {"val": curve, "refit": round(metrics["val_accuracy"], 2), "bits": round(metrics["bits_per_weight"], 3)}
    return {"trial": trial, "domain": domain, "seed": seed} | found


def setting_of(domain: str) -> str:
    """Whose domain it is."""
    return next(setting for setting, domains in DOMAINS.items() if domain in domains)


def table(rows: list[dict[str, Any]]) -> str:
    """A table for each network, a row for each trial: the last epoch's val, and after refitting; and in the mean."""
    tables = []
    for setting, (title, _, _) in SETTINGS.items():
        domains = [d for d in DOMAINS[setting] if any(row["domain"] == d for row in rows)]
        heads = [title, "what it tries", *domains, "mean", "bits", "seeds"]
        lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        for trial, what in TRIALS.items():
            mine = [row for row in rows if row["trial"] == trial and row["domain"] in domains]
            if not mine:
                continue
            pairs = {}
            for domain in domains:
                if runs := [row for row in mine if row["domain"] == domain]:
                    pairs[domain] = mean(row["val"][-1] for row in runs), mean(row["refit"] for row in runs)
            cells = ["{:.1f} / {:.1f}".format(*pairs[d]) if d in pairs else "–" for d in domains]
            whole = len(pairs) == len(domains)
            cells.append("**{:.1f} / {:.1f}**".format(*map(mean, zip(*pairs.values(), strict=True))) if whole else "–")
            seeds = len({row["seed"] for row in mine})
            lines.append(f"| `{trial}` | {what} | " + " | ".join(cells) + f" | {mine[0]['bits']} | {seeds} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


if __name__ == "__main__":
    main()
