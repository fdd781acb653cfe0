"""Which rule detects an image's domain best?

    polymask demo --out LIBRARY
    polymask learn flowers --data SOURCE --side 96 --epochs 4 --limit 1200 --out LIBRARY
    polymask learn gtsrb --data SOURCE --side 64 --epochs 4 --limit 900 --out LIBRARY
    python benchmarks/auto_domain.py --library LIBRARY --domain NAME=SOURCE … \\
        --out results/auto-domain.json

Every rule gives a score to (image, domain), and the domain with the largest score is chosen. The images
are test images, the same number for each domain, of classes that the domain knows; no rule has seen
them. `right` is the share whose own domain was chosen, averaged over domains. Rules based on
logits are measured on the domains that have a pack in the library. The cosine to the likeness,
which needs no pack, is measured on those and on all domains.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import polymask as pm
from polymask.data.load import load_data
from polymask.data.preprocess import Preprocess
from polymask.files import write_atomically
from polymask.pack.format import packs_in
from polymask.train.predict import likeness, likeness_cosines, logits, network, read_likeness

DEMO = ("digits", "letters", "solar-cells")


def entropy(z: Tensor) -> Tensor:
    return -(z.softmax(1) * z.log_softmax(1)).sum(1)


def margin(z: Tensor) -> Tensor:
    first, second = z.topk(2, 1).values.unbind(1)
    return first - second


LOGIT_RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "log mean exp of logits": lambda z: z.logsumexp(1) - math.log(z.shape[1]),
    "largest probability": lambda z: z.softmax(1).amax(1),
    "largest probability beyond chance": lambda z: (z.softmax(1).amax(1) - 1 / z.shape[1]) / (1 - 1 / z.shape[1]),
    "1 - entropy / ln C": lambda z: 1 - entropy(z) / math.log(z.shape[1]),
    "- entropy": lambda z: -entropy(z),
    "margin of logits": margin,
    "largest logit": lambda z: z.amax(1),
    "log sum exp of logits": lambda z: z.logsumexp(1),
    "log sum exp - mean of logits": lambda z: z.logsumexp(1) - z.mean(1),
    "standard deviation of logits": lambda z: z.std(1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, default=Path("demo"))
    parser.add_argument("--domain", action="append", default=[], metavar="NAME=SOURCE")
    parser.add_argument("--images", type=int, default=100, help="of each domain")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sources = {name: name for name in DEMO} | dict(given.split("=", 1) for given in options.domain)
    packs = {path.stem: path for path in packs_in(options.library) if path.stem in sources}
    base = pm.load_base(pm.inspect(next(iter(packs.values()))).manifest.base)
    domains = {name: pm.load_domain(path, base) for name, path in packs.items()}
    images, labels, likenesses, features = {}, {}, {}, {}
    for name, source in sources.items():
        data = load_data(source, seed=0)
        split = data.test if data.test is not None else data.val
        places = np.random.default_rng(1).permutation(len(split))[: options.images]
        images[name] = [split.image(int(place)) for place in places]
        labels[name] = torch.from_numpy(split.labels[places])
        likenesses[name] = read_likeness(likeness(base, data.train), base.feature_dim)
        features[name] = ask(base.net, base.input, images[name])
        print(name, file=sys.stderr, flush=True)
    said = {
        (asked, name): ask(network(base, domain), domain.input, images[asked])
        for name, domain in domains.items()
        for asked in domains
    }
    rules = {
        label: chosen_right({a: torch.stack([rule(said[a, n]) for n in packs], 1) for a in packs})
        for label, rule in LOGIT_RULES.items()
    }
    rules["cosine to the likeness"] = by_likeness(features, likenesses, list(packs))
    report = {
        "base": base.name,
        "images_of_each_domain": options.images,
        "accuracy": {name: float((said[name, name].argmax(1) == labels[name]).float().mean()) for name in packs},
        "rules": rules,
        "likeness_on_all": by_likeness(features, likenesses, list(sources)),
    }
    show(report)
    if options.out is not None:
        write_atomically(options.out, (json.dumps(report, indent=1) + "\n").encode())


def by_likeness(features: dict[str, Tensor], likenesses: dict[str, Tensor], names: list[str]) -> dict[str, Any]:
    together = torch.stack([likenesses[name] for name in names])
    return chosen_right({name: likeness_cosines(features[name], together) for name in names})


@torch.no_grad()
def ask(net: Callable[[Tensor], Tensor], spec: pm.InputSpec, images: list) -> Tensor:
    feed = Preprocess(spec)
    crops = [feed.piece(image) for image in images]
    return torch.cat([logits(net, feed.batch(crops[i : i + 20])) for i in range(0, len(crops), 20)])


def chosen_right(scores: dict[str, Tensor]) -> dict[str, Any]:
    """The share of each domain's images that a rule assigns to it."""
    shares = {
        name: float((found.argmax(1) == place).float().mean()) for place, (name, found) in enumerate(scores.items())
    }
    return {"right": float(np.mean(list(shares.values()))), "by_domain": shares}


def show(report: dict[str, Any]) -> None:
    print("accuracy".ljust(36), {name: f"{one:.0%}" for name, one in report["accuracy"].items()})
    rows = sorted(report["rules"].items(), key=lambda item: -item[1]["right"])
    for label, one in [*rows, ("cosine to the likeness, all domains", report["likeness_on_all"])]:
        each = "  ".join(f"{name} {share:.0%}" for name, share in one["by_domain"].items())
        print(f"{label:36}{one['right']:6.1%}   {each}")


if __name__ == "__main__":
    main()
