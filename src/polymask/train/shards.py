"""A rank's piece of every batch."""

import hashlib
from collections.abc import Generator, Iterator
from contextlib import closing

import numpy as np
from torch import Tensor

from polymask.data.loader import Loader
from polymask.train.predict import Batches

_SAMPLED = 50  # images that stand for all when data is compared


class Shard:
    """The pieces of a rank, for training.

    Batch norm needs two images. So where a batch has fewer than two for each rank, every rank runs
    the whole of it, and only rank 0's counts. `counted` is the number of images of the batch given
    last that count.
    """

    def __init__(self, whole: Batches, rank: int, world: int) -> None:
        self.whole, self.rank, self.world = whole, rank, world
        self.counted = 0

    def __len__(self) -> int:
        return len(self.whole)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The pieces of an epoch's batches, from batch `start` on."""
        with closing(self._sized(epoch, start)) as pieces:
            for size, images, labels in pieces:
                self.counted = len(labels)
                if self._is_small(size) and self.rank > 0:
                    self.counted = 0
                yield images, labels

    def counted_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The pieces that count: over all ranks every image once."""
        for images, labels in self.batches():
            if self.counted:
                yield images, labels

    def cut(self, size: int) -> slice:
        """Which images of a batch of this size are in the piece."""
        if self._is_small(size):
            return slice(size)
        return slice(size * self.rank // self.world, size * (self.rank + 1) // self.world)

    def _is_small(self, size: int) -> bool:
        return size < 2 * self.world

    def _sized(self, epoch: int, start: int) -> Generator[tuple[int, Tensor, Tensor], None, None]:
        """The size of each batch, and its piece."""
        if isinstance(self.whole, Loader):
            with closing(self.whole.pieces(self.cut, epoch, start)) as pieces:
                for size, piece in zip(self.whole.sizes()[start:], pieces, strict=True):
                    yield size, *piece
            return
        for images, labels in self.whole.batches(epoch, start):
            kept = self.cut(len(labels))
            yield len(labels), images[kept], labels[kept]


def describe(batches: Batches | None) -> dict[str, str]:
    """What two processes must have in common to have the same images."""
    if batches is None:
        return {"images": "none"}
    found = hashlib.sha256()
    if not isinstance(batches, Loader):
        for tensor in next(iter(batches.batches())):
            found.update(tensor.contiguous().numpy().tobytes())
        return {"batches": str(len(batches)), "first batch": found.hexdigest()[:12]}
    cache = batches.cache
    places = np.linspace(0, len(cache) - 1, min(_SAMPLED, len(cache))).astype(int)
    for place in places.tolist():
        found.update(cache.image(place).contiguous().numpy().tobytes())
    return {
        "images": str(len(cache)),
        "labels": hashlib.sha256(cache.labels.numpy().tobytes()).hexdigest()[:12],
        "pixels": found.hexdigest()[:12],
        "size of a batch": str(batches.batch_size),
        "seed of the order": str(batches.seed),
    }
