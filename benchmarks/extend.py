"""New classes step by step: accuracy on old, new and all classes, beside what the literature does.

    python benchmarks/extend.py --domain flowers=DIR --steps 52,10,10,10,10,10 --base B --out results/extend.json \\
        [--systems head,norms,…] [--seeds 0,1,2] [--recipe standard] [--epochs N] [--side N] [--limit N] [--work WORK]
    python benchmarks/extend.py --table --out results/extend.json

The first step is learned as any domain, the others extend it with new classes' images alone. Systems:

    head, norms, mask            the three ways of `polymask extend`, on affine-centred
    head+20, mask+20             the same with 20 images of each old class
    icarl                        the nearest mean of the 20 images' features, of the network of mask+20
    finetuning, lwf              the whole network on the new images, without and with the old one as teacher
    retraining                   affine-centred on all images of all classes so far: the ceiling

Any number of images may be kept instead of 20. A system's text may give the rate of its later steps, such as
`lwf:rate=1e-3`, of which the steps take a fifth as `extend` does; without, it is the recipe's. `val` is of validation
images of all classes so far, by which rates are to be chosen: with `--out results/extend-search.json`. Images are the
same for all, and so are recipe and epochs of every step. A finished step is kept in `--out`, its pack in
`--work`; both are skipped when it is started again.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kept import mean, read, recipe_of, training_options, write
from torch.nn.functional import normalize

import polymask as pm
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.data.loader import loader_at
from polymask.data.split import SubsetSplit
from polymask.lifelong.exemplars import choose_exemplars, read_exemplars, with_exemplars_of, write_exemplars
from polymask.train.unknown import observe

METHOD = "affine-centred"  # the default of `learn`
SYSTEMS: dict[str, dict[str, Any]] = {
    "head": {"way": "head"},
    "norms": {"way": "norms"},
    "mask": {"way": "mask"},
    "finetuning": {"method": "finetune", "way": "mask", "teacher": 0.0},
    "lwf": {"method": "finetune", "way": "mask"},
    "retraining": {"again": True},
}
ASKED = "head,norms,mask,head+20,mask+20,finetuning,lwf,retraining"


def main() -> None:
    parser = training_options(__doc__, "extend.work")
    parser.add_argument("--domain", metavar="NAME=SOURCE")
    parser.add_argument("--steps", default="52,10,10,10,10,10", help="classes of each step")
    parser.add_argument("--systems", default=ASKED)
    options = parser.parse_args()
    if options.table:
        print_table(read(options.out))
        return
    base = pm.load_base(options.base, weights=options.weights)
    name, source = options.domain.split("=", 1)
    recipe = recipe_of(options)
    ends = np.cumsum([int(size) for size in options.steps.split(",")]).tolist()
    for seed in map(int, options.seeds.split(",")):
        data = load_data(source, seed=seed, limit=options.limit)
        if ends[-1] > len(data.classes):
            raise SystemExit(f"{source} has {len(data.classes)} classes, the steps take {ends[-1]}")
        for system in options.systems.split(","):
            run(base, data, name, system, ends, recipe, seed, options.work, options.out)


def run(base, data, name, system, ends, recipe, seed, work: Path, out: Path) -> None:
    """All steps of one system, from the first that is not finished."""
    text, _, rate = system.partition(":rate=")
    way, _, keeps = text.partition("+")
    how = dict(SYSTEMS[way])
    method, again = how.pop("method", METHOD), how.pop("again", False)
    later = replace(recipe, rate=float(rate), weight_rate=float(rate)) if rate else recipe
    for step, end in enumerate(ends):
        key = f"{name} {system} {seed} {step}"
        path = work / f"{name}-{system.replace(':', '-')}-{seed}" / f"step{step}.safetensors"
        if key in read(out) and path.exists():
            continue
        begin, given = ends[step - 1] if step else 0, later if step else recipe
        now, new = classes_between(data, 0, end), classes_between(data, begin, end)
        if step == 0 or again:
            domain = first_step(base, now, method, given, seed, path, work if step == 0 else None, name)
            if keeps:
                write_exemplars(path, domain, *choose_exemplars(base, domain, now, int(keeps)))
        else:
            before = path.with_name(f"step{step - 1}.safetensors")
            old = pm.load_domain(before, base)
            kept = read_exemplars(before, old) if keeps else None
            domain = pm.extend(base, old, new, recipe=given, seed=seed, exemplars=kept, **how).domain
            if kept is not None:
                with_exemplars_of(path, base, domain, kept, new)
        domain.save(path)
        about = {"domain": name, "system": system, "seed": seed, "step": step, "classes": end, "base": base.name}
        about |= {"recipe": given.to_json(), "bytes": path.stat().st_size}
        about["val"] = accuracies(observe(base, domain, loader_at(now.val, domain.input)), begin)["all"]
        rows = {key: about | accuracies(observed(base, domain, now), begin)}
        if way == "mask" and keeps:
            exemplars = read_exemplars(path, domain)
            means = class_means(observe(base, domain, loader_at(exemplars, domain.input)), end)
            nearest = system.replace("mask+20" if keeps == "20" else "mask", "icarl")
            rows[key.replace(system, nearest)] = (
                about | {"system": nearest, "val": None} | accuracies(observed(base, domain, now), begin, means)
            )
        write(out, rows)
        print(key, {part: rows[key][part] for part in ("old", "new", "all", "val")}, flush=True)


def first_step(base, data, method, recipe, seed, path: Path, shared: Path | None, name: str) -> pm.Domain:
    """The domain of a step that is learned from its images; the first is the same for all systems of a method."""
    once = path if shared is None else shared / f"{name}-first-{method}-{seed}.safetensors"
    if not once.exists():
        pm.learn(base, data, method, recipe, seed=seed, progress=False).domain.save(once)
    return pm.load_domain(once, base)


def classes_between(data: DomainData, begin: int, end: int) -> DomainData:
    """The images of some of the classes, numbered from 0."""
    parts = {}
    for part, split in data.splits().items():
        some = SubsetSplit(split, np.flatnonzero((split.labels >= begin) & (split.labels < end)))
        parts[part] = some.relabelled(some.labels - begin)
    return replace(data, classes=data.classes[begin:end], submission=None, **parts)


def observed(base: pm.Base, domain: pm.Domain, data: DomainData) -> Any:
    return observe(base, domain, loader_at(data.test or data.val, domain.input))


def class_means(seen: Any, classes: int) -> torch.Tensor:
    unit = normalize(seen.features, dim=1)
    return normalize(torch.stack([unit[seen.labels == c].mean(0) for c in range(classes)]), dim=1)


def accuracies(seen: Any, begin: int, means: torch.Tensor | None = None) -> dict[str, float | None]:
    """In percent: of test images of old classes, of new ones, and of all."""
    guess = seen.logits.argmax(1) if means is None else (normalize(seen.features, dim=1) @ means.T).argmax(1)
    right, new = (guess == seen.labels).double(), seen.labels >= begin
    share = {"old": right[~new], "new": right[new], "all": right}
    return {name: 100 * float(part.mean()) if len(part) else None for name, part in share.items()}


def print_table(rows: dict[str, Any]) -> None:
    """A line for each system: all classes after each step, then old and new after the last; means over seeds."""
    for domain in dict.fromkeys(row["domain"] for row in rows.values()):
        mine = [row for row in rows.values() if row["domain"] == domain]
        steps = sorted({row["step"] for row in mine})
        counts = [next(row["classes"] for row in mine if row["step"] == step) for step in steps]
        parts = ["old", "new"] + ["val"] * any(row.get("val") is not None for row in mine)
        heads = [domain, *(f"{count} classes" for count in counts), *(f"{part} at last" for part in parts)]
        print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
        for system in dict.fromkeys(row["system"] for row in mine):
            its = [row for row in mine if row["system"] == system]
            cells = [mean(row["all"] for row in its if row["step"] == step) for step in steps]
            cells += [mean(row.get(part) for row in its if row["step"] == steps[-1]) for part in parts]
            print(f"| {system} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
