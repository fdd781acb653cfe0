"""One image and its label at a time, for the loaders of other libraries."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymask.data.cache import Cache
from polymask.data.transforms import Transform


class Samples(Dataset[tuple[Tensor, int]]):
    """A cache's images as the network sees them, for a `torch.utils.data.DataLoader`.

    Item i is (float32 (C, H, W), label). Random crops draw from torch's generator, so
    `torch.manual_seed` decides them, and each worker of a DataLoader has its own.
    """

    def __init__(self, cache: Cache, transform: Transform) -> None:
        self.cache, self.transform = cache, transform

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = np.random.default_rng(int(torch.randint(2**62, ())))
        crop = self.transform.crop(self.cache.image(index), draw)
        return self.transform.batch([crop])[0], int(self.cache.labels[index])
