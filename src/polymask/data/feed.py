"""How one domain's images are cut and scaled: as in its evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from polymask.core.input import InputSpec
from polymask.data.cache import shrink_of
from polymask.data.transforms import Transform, centre_crop

if TYPE_CHECKING:
    from PIL.Image import Image


class Feed:
    """From RGB images to what a network with this input sees."""

    def __init__(self, spec: InputSpec) -> None:
        self.shrink = shrink_of(spec)
        self.transform = Transform(centre_crop(spec), spec)

    def crop(self, image: Image) -> Tensor:
        """One RGB image as uint8 (3, side, side)."""
        pixels = torch.from_numpy(self.shrink(image)).permute(2, 0, 1)
        return self.transform.crop(pixels, np.random.default_rng(0))  # a centre crop draws nothing

    def batch(self, crops: Tensor | Sequence[Tensor]) -> Tensor:
        """Crops uint8 (N, 3, side, side) as the network sees them: float32 (N, C, side, side)."""
        return self.transform.batch(crops.unbind() if isinstance(crops, Tensor) else crops)
