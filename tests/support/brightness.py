"""Images whose class is how bright they are, and a small network that takes any size."""

import numpy as np
import torch
from torch import nn

import polymask as pm
from polymask.data.images import DomainData
from polymask.data.split import ArraySplit

SPEC = pm.InputSpec(shape=(3, 24, 24), mean=(0.5,) * 3, std=(0.5,) * 3)


def split(seed, classes, count=24):
    """Noise, brighter from class to class."""
    rng, step = np.random.default_rng(seed), 150 // max(1, classes - 1)
    labels = np.arange(count) % classes
    pixels = rng.integers(0, 100, (count, 48, 48, 3)) + step * labels[:, None, None, None]
    return ArraySplit(f"made {seed}", pixels.astype(np.uint8), labels)


def made_data(*classes):
    """Train, val and test of these classes, from dark to light."""
    return DomainData("made", classes, *(split(seed, len(classes)) for seed in (1, 2, 3)))


def made_base(*, fixed=False):
    """A network with random weights; one that is `fixed` takes images of one size only."""
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    pooled = [nn.Flatten(), nn.Linear(8 * 12 * 12, 16)] if fixed else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return pm.load_base(nn.Sequential(*body, *pooled, nn.Linear(16 if fixed else 8, 4)), name="made", input=SPEC)
