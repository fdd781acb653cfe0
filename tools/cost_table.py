"""Write the table of costs in docs/reproduce.md: operations of training, counted.

python tools/cost_table.py [--check]
"""

import argparse
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from polymask.core.accounting import flops
from polymask.nets.zoo import build
from polymask.train.recipe import RECIPES

PAGE = Path(__file__).parents[1] / "docs" / "reproduce.md"
BEGIN, END = "<!-- costs: tools/cost_table.py -->\n", "<!-- end of costs -->\n"
SUSTAINED = 10e12  # operations a second: an assumption, which the page states
SKETCH = {"CUBS": 5994, "Cars": 8144, "Flowers": 2040, "WikiArt": 42129, "Sketch": 16000}
DECATHLON = {  # train and val
    "aircraft": 3334 + 3333,
    "cifar100": 40000 + 10000,
    "daimlerpedcls": 23520 + 5880,
    "dtd": 1880 + 1880,
    "gtsrb": 31367 + 7842,
    "omniglot": 17853 + 6492,
    "svhn": 47217 + 26040,
    "ucf101": 7585 + 1952,
    "vgg-flowers": 1020 + 1020,
}
IMAGENET = 1281167  # train
IMAGENET_72 = 1232167  # the decathlon's train
IMAGENET_72_VAL = 49000


@dataclass(frozen=True)
class Training:
    """One network on some images, by a recipe."""

    what: str
    network: str
    images: int
    recipe: str


RETRAINED = "PackNet, its base on ImageNet, each order and seed"
TRAININGS = (
    *(
        Training(what, f"torchvision:{name}", images, "imagenet-to-sketch")
        for what, images in (
            ("ImageNet-to-Sketch, 5 domains", sum(SKETCH.values())),
            (RETRAINED, IMAGENET),
        )
        for name in ("resnet50", "densenet121", "vgg16")
    ),
    Training("Decathlon, the base", "decathlon-wrn28", IMAGENET_72, "pretrain"),
    Training("Decathlon, 9 domains", "decathlon-wrn28", sum(DECATHLON.values()), "decathlon"),
    Training("Decathlon, the base", "decathlon-resnet26", IMAGENET_72, "pretrain"),
    Training(
        "Decathlon, 9 domains, adapters",
        "decathlon-resnet26",
        sum(DECATHLON.values()),
        "residual-adapters",
    ),
    Training(
        "RA-N, its base on ImageNet, each domain and seed",
        "decathlon-resnet26",
        IMAGENET_72 + IMAGENET_72_VAL,
        "residual-adapters",
    ),
)


def main() -> int:
    """Write the table, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    fresh = before + BEGIN + table() + END + after
    if check:
        if fresh != text:
            print("docs/reproduce.md is stale; run python tools/cost_table.py", file=sys.stderr)
        return 0 if fresh == text else 1
    PAGE.write_text(fresh)
    return 0


def table() -> str:
    """One line for each training."""
    heads = (
        "training",
        "network",
        "images",
        "epochs",
        "GFLOP an image",
        "× 3 × images × epochs",
        "images a second",
        "hours",
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += [line(training) for training in TRAININGS]
    return "\n".join(lines) + "\n"


def line(training: Training) -> str:
    """What one training costs."""
    recipe = RECIPES[training.recipe]
    each = forward(training.network, training.recipe)
    total = 3 * each * training.images * recipe.epochs
    cells = (
        training.what,
        training.network.removeprefix("torchvision:"),
        f"{training.images:,}",
        str(recipe.epochs),
        f"{each / 1e9:.2f}",
        f"{total / 1e15:,.1f} PFLOP",
        f"{SUSTAINED / (3 * each):,.0f}",
        f"{total / SUSTAINED / 3600:.1f}",
    )
    return "| " + " | ".join(cells) + " |"


@cache
def forward(network: str, recipe: str) -> int:
    """Operations of one image through a network, at the recipe's size."""
    net, spec = build(network, pretrained=False, device="meta")
    return flops(net.eval(), RECIPES[recipe].input(spec).shape)


if __name__ == "__main__":
    sys.exit(main())
