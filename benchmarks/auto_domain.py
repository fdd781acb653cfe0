"""Which rule tells an image's domain best?

polymask demo
python benchmarks/auto_domain.py --library demo --label demo --out results/auto-domain.json
    [--domain NAME=SOURCE …] [--weights FILE]

Every rule gives a score to (image, domain), and the domain with the largest is chosen. The images
are test images, the same number for each domain, of classes that the domain knows; no rule has seen
them. `right` is the share whose own domain was chosen, averaged over domains. A likeness is made
of up to 256 training images.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import polymask as pm
from polymask.data import load_data
from polymask.feed import Feed
from polymask.likeness import fit, likeness, read_likeness
from polymask.pack import SUFFIX
from polymask.predict import logits, network
from polymask.serve import auto

DEMO = ("digits", "letters", "solar-cells")


def entropy(z: Tensor) -> Tensor:
    return -(z.softmax(1) * z.log_softmax(1)).sum(1)


def margin(z: Tensor) -> Tensor:
    first, second = z.topk(2, 1).values.unbind(1)
    return first - second


LOGIT_RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "log mean exp of logits": auto.size,
    "largest probability": lambda z: z.softmax(1).amax(1),
    "largest probability beyond chance": lambda z: (
        (z.softmax(1).amax(1) - 1 / z.shape[1]) / (1 - 1 / z.shape[1])
    ),
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
    parser.add_argument("--weights", type=Path, help="of the base, where it needs some")
    parser.add_argument("--images", type=int, default=100, help="of each domain")
    parser.add_argument("--label", default="demo", help="of this library in the results")
    parser.add_argument("--out", type=Path, help="added to what is in the file")
    options = parser.parse_args()
    sources = {name: name for name in DEMO if (options.library / f"{name}{SUFFIX}").exists()}
    sources |= dict(given.split("=", 1) for given in options.domain)
    base, domains = load(options.library, options.weights, list(sources))
    images, labels, likenesses = {}, {}, []
    for name, source in sources.items():
        data = load_data(source, seed=0, classes=len(domains[name].classes))
        split = data.test if data.test is not None else data.val
        places = np.random.default_rng(1).permutation(len(split))[: options.images]
        images[name] = [split.image(int(place)) for place in places]
        labels[name] = torch.from_numpy(split.labels[places])
        likenesses.append(read_likeness(likeness(base, data.train), base.feature_dim))
    said = {
        (asked, name): ask(network(base, domain), domain.input, pictures)
        for name, domain in domains.items()
        for asked, pictures in images.items()
    }
    scores = {
        label: {a: torch.stack([rule(said[a, name]) for name in sources], 1) for a in sources}
        for label, rule in LOGIT_RULES.items()
    }
    features = {name: ask(base.net, base.input, pictures) for name, pictures in images.items()}
    scores["cosine to the likeness"] = {
        name: fit(features[name], torch.stack(likenesses)) for name in sources
    }
    accuracies = {
        name: float((said[name, name].argmax(1) == labels[name]).float().mean()) for name in sources
    }
    report = {
        "base": base.name,
        "images_of_each_domain": options.images,
        "accuracy": accuracies,
        "rules": {label: chosen_right(found) for label, found in scores.items()},
    }
    show(report)
    if options.out is not None:
        known = json.loads(options.out.read_text()) if options.out.exists() else {}
        known[options.label] = report
        options.out.write_text(json.dumps(known, indent=1) + "\n")


def load(library: Path, weights: Path | None, names: list[str]):
    """The base of a library and the domains of these names."""
    paths = {name: library / f"{name}{SUFFIX}" for name in names}
    base = pm.load_base(pm.inspect(paths[names[0]]).manifest.base, weights=weights)
    return base, {name: pm.load_domain(path, base) for name, path in paths.items()}


@torch.no_grad()
def ask(net: Callable[[Tensor], Tensor], spec: pm.InputSpec, images: list) -> Tensor:
    feed = Feed(spec)
    crops = [feed.crop(image) for image in images]
    return torch.cat([logits(net, feed.batch(crops[i : i + 20])) for i in range(0, len(crops), 20)])


def chosen_right(scores: dict[str, Tensor]) -> dict:
    """The share of each domain's images that a rule gives to it."""
    shares = {
        name: float((found.argmax(1) == place).float().mean())
        for place, (name, found) in enumerate(scores.items())
    }
    return {"right": float(np.mean(list(shares.values()))), "by_domain": shares}


def show(report: dict) -> None:
    print("accuracy".ljust(36), {name: f"{one:.0%}" for name, one in report["accuracy"].items()})
    for label, one in sorted(report["rules"].items(), key=lambda item: -item[1]["right"]):
        each = "  ".join(f"{name} {share:.0%}" for name, share in one["by_domain"].items())
        print(f"{label:36}{one['right']:6.1%}   {each}")


if __name__ == "__main__":
    main()
