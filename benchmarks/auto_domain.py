"""Which rule tells an image's domain best, from what every domain's network says of it?

polymask demo
python benchmarks/auto_domain.py --library demo --out results/auto-domain.json
    [--domain flowers=PATH …]

Every rule gives a score to (image, domain), and the domain with the largest is chosen. The images
are test images, the same number for each domain, and no rule has seen them: `right` is the share
whose own domain was chosen, averaged over domains.
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
from polymask.pack import SUFFIX
from polymask.predict import logits, network
from polymask.serve.auto import score
from polymask.serve.images import Feed

DEMO = ("digits", "letters", "solar-cells")


def entropy(z: Tensor) -> Tensor:
    return -(z.softmax(1) * z.log_softmax(1)).sum(1)


def margin(z: Tensor) -> Tensor:
    first, second = z.topk(2, 1).values.unbind(1)
    return first - second


RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "the server's": score,
    "largest probability": lambda z: z.softmax(1).amax(1),
    "largest probability beyond chance": lambda z: (
        (z.softmax(1).amax(1) - 1 / z.shape[1]) / (1 - 1 / z.shape[1])
    ),
    "1 - entropy / ln C": lambda z: 1 - entropy(z) / math.log(z.shape[1]),
    "- entropy": lambda z: -entropy(z),
    "margin of logits": margin,
    "largest logit": lambda z: z.amax(1),
    "log sum exp": lambda z: z.logsumexp(1),
    "log sum exp - ln C": lambda z: z.logsumexp(1) - math.log(z.shape[1]),
    "log sum exp - mean logit": lambda z: z.logsumexp(1) - z.mean(1),
    "largest logit - mean logit": lambda z: z.amax(1) - z.mean(1),
    "standard deviation of logits": lambda z: z.std(1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, default=Path("demo"))
    parser.add_argument("--domain", action="append", default=[], metavar="NAME=SOURCE")
    parser.add_argument("--weights", type=Path, help="of the base, where it needs some")
    parser.add_argument("--images", type=int, default=100, help="of each domain")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sources = {name: name for name in DEMO if (options.library / f"{name}{SUFFIX}").exists()}
    sources |= dict(given.split("=", 1) for given in options.domain)
    said, right = ask_all(options.library, options.weights, sources, options.images)
    if __import__("os").environ.get("KEEP"):
        torch.save((said, right), __import__("os").environ["KEEP"])
    found = {
        "domains": {name: {"images": options.images, "accuracy": right[name]} for name in sources},
        "rules": {
            label: {
                "right": float(np.mean(list(shares.values()))),
                "right_by_domain": shares,
            }
            for label, rule in RULES.items()
            for shares in [chosen_right(rule, said, list(sources))]
        },
    }
    for label, one in sorted(found["rules"].items(), key=lambda item: -item[1]["right"]):
        each = "  ".join(f"{name} {share:.0%}" for name, share in one["right_by_domain"].items())
        print(f"{label:36}{one['right']:6.1%}   {each}")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def ask_all(
    library: Path, weights: Path | None, sources: dict[str, str], count: int
) -> tuple[dict[tuple[str, str], Tensor], dict[str, float]]:
    """Logits of (images' domain, answering domain), and each domain's own accuracy."""
    paths = {name: library / f"{name}{SUFFIX}" for name in sources}
    manifest = pm.inspect(next(iter(paths.values()))).manifest
    base = pm.load_base(manifest.base, weights=weights)
    images, labels = {}, {}
    for name, source in sources.items():
        data = load_data(source, seed=0)
        split = data.test if data.test is not None else data.val
        places = np.random.default_rng(1).permutation(len(split))[:count]
        images[name] = [split.image(int(place)) for place in places]
        labels[name] = torch.from_numpy(split.labels[places])
    said, right = {}, {}
    for name, path in paths.items():
        domain = pm.load_domain(path, base)
        net, feed = network(base, domain), Feed(domain.input)
        for other, pictures in images.items():
            draw = np.random.default_rng(0)
            crops = [
                feed.transform.crop(torch.from_numpy(feed.shrink(picture)).permute(2, 0, 1), draw)
                for picture in pictures
            ]
            said[other, name] = logits(net, feed.batch(torch.stack(crops)))
        right[name] = float((said[name, name].argmax(1) == labels[name]).float().mean())
    return said, right


def chosen_right(
    rule: Callable[[Tensor], Tensor], said: dict[tuple[str, str], Tensor], names: list[str]
) -> dict[str, float]:
    shares = {}
    for place, name in enumerate(names):
        scores = torch.stack([rule(said[name, other]) for other in names], 1)
        shares[name] = float((scores.argmax(1) == place).float().mean())
    return shares


if __name__ == "__main__":
    main()
