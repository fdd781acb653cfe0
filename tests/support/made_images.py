"""Domains of a few images that are made, in memory."""

import numpy as np

from polymask.data.images import DomainData
from polymask.data.split import ArraySplit


def images(names=("a", "b"), seed=0, shade=None) -> DomainData:
    """24 images of 20 x 20 pixels in each split: noise, or all of one shade."""
    draw = np.random.default_rng(seed)
    labels = np.arange(24) % len(names)

    def split() -> ArraySplit:
        pixels = draw.integers(0, 256, (24, 20, 20, 3)) if shade is None else np.full((24, 20, 20, 3), shade)
        return ArraySplit("made", pixels.astype(np.uint8), labels)

    return DomainData("made", names, split(), split(), split())
