"""Every method learns real pictures that a head alone cannot.

A small network is trained on eight of the handwritten digits. Then every method learns, by
`fit_all`, to tell the other two digits apart, and two letters, whose test fonts are new.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import polymask as pm
from nets import SPEC, BlockNet
from polymask.data import load_data
from polymask.recipes import Recipe
from polymask.sequence import Fitted, Lesson, fit_all

RECIPE = Recipe(
    epochs=8,
    batch_size=16,
    rate=2e-3,
    weight_rate=2e-3,
    head_optimiser="adam",
    head_rate=1e-2,
    schedule="cosine",
)
NEW_DIGITS, NEW_LETTERS = (3, 8), (2, 6)  # 3 and 8, C and G
KNOWN_DIGITS = tuple(i for i in range(10) if i not in NEW_DIGITS)

# Masks under the base's own norms come apart at the rate that suits the others.
RATES = {"piggyback": 3e-4, "piggyback-star": 3e-4}

# Methods that cannot beat a head alone here, and why.
CANNOT = {
    "classifier-only": "it is the head alone",
    "ba2-50": "half the channels of layers of 4 to 12 are too few for both problems",
    "ba2-25": "as above, with a quarter",
}

ONE_OF_A_KIND = list(
    {type(pm.create_method(name)): name for name in reversed(pm.list_methods())}.values()
)


class Tensors:
    """Batches of images in memory, shuffled by epoch."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, size: int = 16) -> None:
        self.images, self.labels, self.size = images, labels, size

    def __len__(self) -> int:
        return len(self.labels) // self.size

    def batches(self, epoch: int = 0, start: int = 0):
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(epoch))
        for step in range(start, len(self)):
            rows = order[step * self.size : (step + 1) * self.size]
            yield self.images[rows], self.labels[rows]


def pictures(split, classes: tuple[int, ...]) -> Tensors:
    """The images of some classes, 16 pixels wide."""
    rows = np.flatnonzero(np.isin(split.labels, classes))
    pixels = np.stack([np.asarray(split.image(int(row)))[..., :1] for row in rows])
    small = F.avg_pool2d(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255, 4)
    labels = [classes.index(int(split.labels[row])) for row in rows]
    return Tensors((small.expand(-1, 3, -1, -1) - 0.5) / 0.5, torch.tensor(labels))


def lesson(name: str, classes: tuple[int, ...]) -> Lesson:
    data = load_data(name)
    parts = [pictures(split, classes) for split in (data.train, data.val, data.test)]
    return Lesson([data.classes[i] for i in classes], *parts)


@cache
def lessons() -> dict[str, Lesson]:
    return {"digits": lesson("digits", NEW_DIGITS), "letters": lesson("letters", NEW_LETTERS)}


@cache
def small_base() -> pm.Base:
    torch.manual_seed(0)
    net = BlockNet(len(KNOWN_DIGITS))
    train = pictures(load_data("digits").train, KNOWN_DIGITS)
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for epoch in range(6):
        for images, labels in train.batches(epoch):
            optimiser.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimiser.step()
    return pm.load_base(net.eval(), name="digits-net", input=SPEC)


@cache
def learned(method: str) -> Fitted:
    recipe = replace(RECIPE, rate=RATES.get(method, RECIPE.rate))
    own = lesson("digits", KNOWN_DIGITS) if pm.create_method(method).needs_own else None
    return fit_all(small_base(), lessons(), method, recipe, own=own)


def mean(fitted: Fitted) -> float:
    """What the domains know in the end; where they forget on purpose, what they knew before."""
    found = fitted.final if fitted.base is None else fitted.learned
    return sum(found.values()) / len(found)


@pytest.mark.parametrize(
    "method",
    [
        name if name in ONE_OF_A_KIND else pytest.param(name, marks=pytest.mark.slow)
        for name in pm.list_methods()
    ],
)
def test_every_method_beats_a_head_alone_or_it_is_known_why_not(method):
    gain = mean(learned(method)) - mean(learned("classifier-only"))
    assert (gain <= 0) == (method in CANNOT), f"{method} gains {gain:.1f} points"
    small_base().verify()
