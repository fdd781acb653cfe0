"""Images made small before they are kept, so that a cache is small and a crop is cheap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from polymask.data.extras import require_vision

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]  # (H, W, 3)

_LONGEST = 8  # times the shorter side


@dataclass(frozen=True)
class Shrink:
    """Shorter side to `side`, or with `squash` both sides to it. No side ever grows.

    The ends of an image that is more than eight times as long as it is wide are cut off: enlarged
    to a network's size it would fill the memory, and a crop would see little of it anyway.
    """

    side: int
    squash: bool = False
    interpolation: str = "bilinear"

    def size(self, width: int, height: int) -> tuple[int, int]:
        """The size in which an image of (width, height) is kept."""
        if self.squash:
            return min(width, self.side), min(height, self.side)
        short = min(width, height)
        if short <= self.side:
            return width, height
        return self.side * width // short, self.side * height // short

    def __call__(self, image: Image) -> Pixels:
        """Make an RGB image small: uint8 (H, W, 3)."""
        image = image if self.squash else _cut_ends(image)
        size = self.size(*image.size)
        if size != image.size:
            how = require_vision("PIL.Image").Resampling[self.interpolation.upper()]
            image = image.resize(size, how)
        return np.array(image)


def _cut_ends(image: Image) -> Image:
    width, height = image.size
    kept_width, kept_height = min(width, _LONGEST * height), min(height, _LONGEST * width)
    if (kept_width, kept_height) == (width, height):
        return image
    left, top = (width - kept_width) // 2, (height - kept_height) // 2
    return image.crop((left, top, left + kept_width, top + kept_height))
