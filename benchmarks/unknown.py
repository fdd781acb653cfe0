"""Which rule tells unknown images best? Near and far ones, masks beside the fine-tuned network.

    python benchmarks/unknown.py --domain flowers=DIR --domain cubs=DIR --domain gtsrb=decathlon:ROOT/gtsrb … \\
        --base B --out results/unknown.json --work WORK [--methods affine-centred,finetune] [--seeds 0,1,2]
        [--near flowers,cubs] [--recipe standard] [--epochs N] [--side N] [--limit N] [--images 300]
    python benchmarks/unknown.py --table --out results/unknown.json

A domain of `--near` is learned without its last fifth of classes, whose images are the near unknown ones. Far ones are
test images of all other domains, noise and blank images. For each rule: AUROC, and the share of unknown images that are
accepted where 95 % of known ones are. `val` has the same on validation images: the domain's own, held-out classes' and
other domains'. The default rule is chosen by it. The calibration error is that of test images, before and after the
temperature that val gave. The confusion table is that of all domains by the first method, each with the default rule,
and "none of them". A finished run is kept in `--out`, its pack in `--work`; both are skipped when it is started again.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from kept import mean, read, recipe_of, training_options, write
from torch import Tensor

import polymask as pm
from polymask.core.unknown import RULES
from polymask.data.cache import cache_splits
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.data.loader import Loader
from polymask.data.preprocess import eval_transform
from polymask.data.split import ArraySplit, Split, SubsetSplit
from polymask.train.predict import Network, best_domains, feature_network, likeness_cosines, read_likeness
from polymask.train.unknown import Observed, calibration_error, fit_unknown

SYNTHETIC = ("noise", "blank")
NONE = "none of them"


def main() -> None:
    parser = training_options(__doc__, "unknown.work")
    parser.add_argument("--domain", action="append", default=[], metavar="NAME=SOURCE")
    parser.add_argument("--near", default="flowers,cubs", help="domains that are learned without some classes")
    parser.add_argument("--methods", default="affine-centred,finetune")
    parser.add_argument("--images", type=int, default=300, help="of each domain, at most")
    options = parser.parse_args()
    if options.table:
        print_tables(read(options.out))
        return
    base = pm.load_base(options.base, weights=options.weights)
    sources = dict(given.split("=", 1) for given in options.domain)
    recipe = recipe_of(options)
    near = options.near.split(",")
    for seed in map(int, options.seeds.split(",")):
        whole = {name: load_data(source, seed=seed, limit=options.limit) for name, source in sources.items()}
        known = {n: d.first_classes(round(0.8 * len(d.classes))) if n in near else d for n, d in whole.items()}
        far = {
            name: (chosen(data.test or data.val, options.images), chosen(data.val, options.images))
            for name, data in known.items()
        } | {name: (split, split) for name, split in synthetic().items()}
        own: dict[Split, Tensor] = {}
        for method in options.methods.split(","):
            for name, data in known.items():
                key = f"{name} {method} {seed}"
                if key in read(options.out):
                    continue
                path = options.work / f"{method}-{seed}" / f"{name}.safetensors"
                domain = learned(base, data, method, recipe, seed, path)
                others = {n: s for n, s in far.items() if n != name}
                row = {"domain": name, "method": method, "seed": seed, "recipe": recipe.to_json(), "base": base.name}
                row |= measured(base, domain, whole[name], data, others, options.images, own)
                write(options.out, {key: row})
                print(
                    key, row["accuracy"], {rule: one["far"]["auroc"] for rule, one in row["rules"].items()}, flush=True
                )
            key = f"confusion {method} {seed}"
            if key not in read(options.out):
                folder = options.work / f"{method}-{seed}"
                tested = {name: test for name, (test, _) in far.items()}
                write(options.out, {key: {"seed": seed, "method": method} | confusion(base, folder, known, tested)})


def learned(base: pm.Base, data: DomainData, method: str, recipe: pm.Recipe, seed: int, path: Path) -> pm.Domain:
    if not path.exists():
        pm.learn(base, data, method, recipe, seed=seed, progress=False).domain.save(path)
    return pm.load_domain(path, base)


def chosen(split: Split, most: int) -> Split:
    """At most so many images of a split, the same ones every time."""
    return SubsetSplit(split, np.sort(np.random.default_rng(1).permutation(len(split))[:most]))


def synthetic(count: int = 100, side: int = 96) -> dict[str, Split]:
    """Noise of every scale, and images of one colour."""
    draw = np.random.default_rng(0)
    noise = np.zeros((count, side, side, 3), np.uint8)
    for place in range(count):
        cells = 2 ** (1 + place % 6)
        small = draw.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        noise[place] = np.kron(small, np.ones((-(-side // cells), -(-side // cells), 1), np.uint8))[:side, :side]
    blank = np.broadcast_to(draw.integers(0, 256, (count, 1, 1, 3), dtype=np.uint8), noise.shape).copy()
    return {
        name: ArraySplit(name, images, np.zeros(count, int)) for name, images in (("noise", noise), ("blank", blank))
    }


@torch.no_grad()
def features_of(net: Network, base: pm.Base, data: DomainData, split: Split, spec: pm.InputSpec) -> Tensor:
    transform = eval_transform(data, spec)
    (cache,) = cache_splits([split], transform.shrink)
    batches = Loader(cache, transform, batch_size=64).batches()
    return torch.cat([net(base.placed(images)).float().cpu() for images, _ in batches])


@torch.no_grad()
def observed(base: pm.Base, domain: pm.Domain, data: DomainData, split: Split) -> Observed:
    """What the domain's network makes of images."""
    rows = features_of(feature_network(base, domain), base, data, split, domain.input)
    return Observed(rows, domain.classify(rows.to(base.device)).cpu(), torch.from_numpy(split.labels))


def measured(
    base: pm.Base,
    domain: pm.Domain,
    whole: DomainData,
    data: DomainData,
    far: dict[str, tuple[Split, Split]],
    most: int,
    own: dict[Split, Tensor],
) -> dict[str, Any]:
    """All rules of one domain; `own` keeps the base's features of images, which are the same for every domain."""
    count = len(data.classes)
    sets = {"val": chosen(data.val, most), "test": chosen(data.test or data.val, most)}
    if count < len(whole.classes):
        for part, split in (("near val", whole.val), ("near test", whole.test or whole.val)):
            sets[part] = chosen(SubsetSplit(split, np.flatnonzero(split.labels >= count)), most)
    sets |= {
        f"{name} {part}": split for name, pair in far.items() for part, split in zip(("test", "val"), pair, strict=True)
    }
    found = {part: observed(base, domain, data, split) for part, split in sets.items()}
    train = observed(base, domain, data, chosen(data.train, 2048))
    for split in sets.values():
        if split not in own:
            own[split] = features_of(base.net, base, data, split, base.input)
    likeness = read_likeness(domain.likeness, base.feature_dim)
    rules: dict[str, Any] = {}
    for rule in (*RULES, "likeness"):
        if rule == "likeness":
            scores = {part: likeness_cosines(own[split], likeness[None])[:, 0] for part, split in sets.items()}
            extra = {"bytes": 0}
        else:
            unknown = fit_unknown(rule, train, found["val"])
            scores = {part: unknown.score(one.features, one.logits) for part, one in found.items()}
            extra = {"bytes": unknown.bytes, "temperature": unknown.judgement.temperature}
        by_domain = {name: compared(scores["test"], scores[f"{name} test"]) for name in far}
        row: dict[str, Any] = extra | {"far by domain": by_domain}
        row["far"], from_val = (
            compared(scores[part], torch.cat([scores[f"{name} {part}"] for name in far])) for part in ("test", "val")
        )
        row["val"] = {"far": from_val}
        if "near test" in scores:
            row["near"] = compared(scores["test"], scores["near test"])
            row["val"]["near"] = compared(scores["val"], scores["near val"])
        rules[rule] = row
    test, temperature = found["test"], rules["softmax"]["temperature"]
    return {
        "accuracy": 100 * float((test.logits.argmax(1) == test.labels).float().mean()),
        "classes": [count, len(whole.classes)],
        "images": {part: len(split) for part, split in sets.items()},
        "calibration error": {
            when: calibration_error((test.logits / t).softmax(1), test.labels)
            for when, t in (("before", 1.0), ("after", temperature))
        },
        "rules": rules,
    }


def compared(known: Tensor, unknown: Tensor) -> dict[str, float]:
    """AUROC and the share of unknown images accepted where 95 % of known ones are, both in percent."""
    both = torch.cat([known, unknown]).double()
    place = both.argsort().argsort().double() + 1
    values, inverse = both.unique(return_inverse=True)
    mean = torch.zeros_like(values).index_add_(0, inverse, place) / torch.bincount(inverse)
    ranks, n = mean[inverse][: len(known)], len(known)
    auroc = (ranks.sum() - n * (n + 1) / 2) / (n * len(unknown))
    at = known.sort().values[int(0.05 * n)]
    return {"auroc": 100 * float(auroc), "accepted at 95": 100 * float((unknown >= at).double().mean())}


def confusion(base: pm.Base, folder: Path, known: dict[str, DomainData], far: dict[str, Split]) -> dict[str, Any]:
    """Where images go if no domain is named: rows are what they are, columns what is said."""
    domains = {name: pm.load_domain(folder / f"{name}.safetensors", base) for name in known}
    model = pm.MultiDomainModel(base)
    for name, domain in domains.items():
        model.add(name, domain)
    columns = [*domains, NONE]
    rows: dict[str, dict[str, int]] = {}
    for truth, split in far.items():
        images = [split.image(i) for i in range(min(len(split), 100))]
        names = best_domains(base, domains, images)
        said = model.predict(images, domain=names, reject=True)
        verdicts = [NONE if one.unknown else one.domain for one in said]
        rows[truth] = {column: verdicts.count(column) for column in columns}
    return {"confusion": rows}


def print_tables(rows: dict[str, Any]) -> None:
    """Means over domains and seeds, a line for each method and rule."""
    runs, notes = [row for row in rows.values() if "rules" in row], []
    print("| method | rule | far AUROC | accepted at 95 % | near AUROC | accepted at 95 % | val, far and near | kB |")
    print("|---|---|---|---|---|---|---|---|")
    for method in dict.fromkeys(row["method"] for row in runs):
        for rule in (*RULES, "likeness"):
            mine = [row["rules"][rule] for row in runs if row["method"] == method]
            cells = [
                mean(one.get(where, {}).get(what) for one in mine)
                for where in ("far", "near")
                for what in mine[0]["far"]
            ]
            val = mean(one["val"].get(where, {}).get("auroc") for one in mine for where in ("far", "near"))
            print(f"| {method} | {rule} | {' | '.join(cells)} | {val} | {mean(one['bytes'] / 1000 for one in mine)} |")
        errors = [row["calibration error"] for row in runs if row["method"] == method]
        before, after = (mean(error[when] for error in errors) for when in ("before", "after"))
        notes.append(f"Calibration error of {method} on test images: {before} % before, {after} % at the temperature.")
    for note in notes:
        print(f"\n{note}")
    tables = [row for row in rows.values() if "confusion" in row]
    for row in tables[:1]:
        columns = list(next(iter(row["confusion"].values())))
        print(f"\n| {row['method']}, seed {row['seed']}: images of … | {' | '.join(columns)} |")
        print("|---" * (len(columns) + 1) + "|")
        for truth, counts in row["confusion"].items():
            print(f"| {truth} | {' | '.join(str(counts[column]) for column in columns)} |")


if __name__ == "__main__":
    main()
