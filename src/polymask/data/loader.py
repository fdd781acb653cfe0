"""Batches, made by threads ahead of their use, the same ones every time.

The random numbers of a sample come from (seed, epoch, index) alone, and the order of an epoch from
(seed, epoch). So the batches do not depend on the number of threads, and a run that starts again at
any epoch and batch sees exactly what an undisturbed one does.

How fast images come: `python -m polymask.data.loader SOURCE …` prints a line for each source.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from polymask.core.input import InputSpec
from polymask.core.target import strata
from polymask.data.cache import Cache, cache_domain, cache_splits, default_workers, in_order
from polymask.data.images import DomainData
from polymask.data.load import load_data
from polymask.data.preprocess import Preprocess, eval_transform, train_transform
from polymask.data.split import Labels, Split
from polymask.errors import DataError

Batch = tuple[Tensor, Tensor]  # float32 (N, C, H, W), int64 (N,)

_ORDER, _SAMPLE = 1, 2  # keep the two kinds of random numbers apart


class Loader:
    """Batches of a cache, epoch by epoch.

    With `shuffle` (training) an epoch has its own order, and a last batch of one image, which batch
    norm cannot use, is joined to the one before. Without it the order is the split's. With `balanced` too, an epoch
    draws as many images as there are, with replacement: every class equally often on average. `early` is another
    transform and the epoch that it ends before: smaller images at first, say.
    """

    def __init__(
        self,
        cache: Cache,
        transform: Preprocess,
        *,
        batch_size: int = 32,
        seed: int = 0,
        shuffle: bool = False,
        balanced: bool = False,
        early: tuple[Preprocess, int] | None = None,
        workers: int | None = None,
    ) -> None:
        if batch_size < 1 or seed < 0:
            raise DataError(f"batch_size {batch_size} and seed {seed}: give one from 1, one from 0")
        self.cache, self.transform, self.early = cache, transform, early
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.labels, self.balanced = cache.labels, balanced
        self._shares = class_shares(cache.split.labels) if balanced else None
        self.workers = workers or default_workers()

    @property
    def spec(self) -> InputSpec:
        """How its images are fed."""
        return self.transform.spec

    def as_later(self) -> Loader:
        """The same with the images of later epochs in all of them."""
        other = copy(self)
        other.early = None
        return other

    def __len__(self) -> int:
        """Batches in an epoch."""
        full, rest = divmod(len(self.cache), self.batch_size)
        joins = self.shuffle and rest == 1 and full > 0
        return full + (rest > 0 and not joins)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on.

        Some are made ahead by threads; closing the iterator ends those. An image that fails raises
        where its batch would have come.
        """
        return self.pieces(lambda size: slice(size), epoch, start)

    def pieces(self, cut: Callable[[int], slice], epoch: int = 0, start: int = 0) -> Generator[Batch, None, None]:
        """Of every batch only the images `cut(size of the batch)`; the others are not made."""
        order, times = self._order(epoch)
        last = len(self) - 1

        def make(number: int) -> Batch:
            stop = len(order) if number == last else (number + 1) * self.batch_size
            mine = np.arange(number * self.batch_size, stop)
            mine = mine[cut(len(mine))]
            return self._batch(order[mine], times[mine], epoch)

        return in_order(make, range(start, last + 1), self.workers, 2 * self.workers)

    def sizes(self) -> list[int]:
        """Images in each batch of an epoch."""
        full = len(self) - 1
        return [self.batch_size] * full + [len(self.cache) - full * self.batch_size]

    def samples(self) -> Samples:
        """The same images and crops one at a time, for the loader of another library."""
        return Samples(self.cache, self.transform)

    def throughput(self, seconds: float = 1.0) -> float:
        """Images a second that the loader alone gives, measured over about so many seconds."""
        next(self.batches())  # the first one pays for imports
        images, epoch, begin = 0, 0, time.perf_counter()
        while True:
            for batch, _ in self.batches(epoch):
                images += len(batch)
                elapsed = time.perf_counter() - begin
                if elapsed > seconds:
                    return images / elapsed
            epoch += 1

    def _order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The images of an epoch, and how often each has come before in it."""
        size = len(self.cache)
        first = np.zeros(size, dtype=np.int64)
        if not self.shuffle:
            return np.arange(size), first
        draw = np.random.default_rng([_ORDER, self.seed, epoch])
        if self._shares is None:
            return draw.permutation(size), first
        order = draw.choice(size, size, p=self._shares)
        ranked = np.argsort(order, kind="stable")
        runs = np.searchsorted(order[ranked], order[ranked])  # where the run of an image begins
        first[ranked] = np.arange(size) - runs
        return order, first

    def _transform_of(self, epoch: int) -> Preprocess:
        if self.early is None:
            return self.transform
        earlier, end = self.early
        return earlier if epoch < end else self.transform

    def _batch(self, indices: NDArray[np.int64], times: NDArray[np.int64], epoch: int) -> Batch:
        transform, crops = self._transform_of(epoch), []
        for index, before in zip(indices.tolist(), times.tolist(), strict=True):
            again = [before] if before else []  # an image that comes again is cropped otherwise
            draw = np.random.default_rng([_SAMPLE, self.seed, epoch, index, *again])
            crops.append(transform.crop(self.cache.image(index), draw))
        return transform.batch(crops), self.cache.labels[torch.from_numpy(indices)]


def loader_at(split: Split, spec: InputSpec) -> Loader:
    """Batches of a split for measuring, fed as a domain's input says."""
    preprocess = Preprocess(spec)
    (cache,) = cache_splits([split], preprocess.shrink)
    return Loader(cache, preprocess, batch_size=64)


def class_shares(labels: Labels) -> NDArray[np.float64]:
    """How likely each image is to be drawn where all classes are equally likely; of labels, the rarest counts."""
    _, group, counts = np.unique(strata(labels), return_inverse=True, return_counts=True)
    return np.asarray(1 / (counts[group] * len(counts)))


class Samples(Dataset[tuple[Tensor, int | Tensor]]):
    """A cache's images as the network sees them, for a `torch.utils.data.DataLoader`.

    Item i is (float32 (C, H, W), label). Random crops draw from torch's generator, so
    `torch.manual_seed` decides them, and each worker of a DataLoader has its own.
    """

    def __init__(self, cache: Cache, transform: Preprocess) -> None:
        self.cache, self.transform = cache, transform

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
        draw = np.random.default_rng(int(torch.randint(2**62, ())))
        crop = self.transform.crop(self.cache.image(index), draw)
        label = self.cache.labels[index]
        return self.transform.batch([crop])[0], label if label.ndim else int(label)


@dataclass(frozen=True)
class Speed:
    """Images a second: decoded into a cache, then given as training and as evaluation batches."""

    decode: float
    train: float
    evaluate: float


def measure_speed(data: DomainData, spec: InputSpec, *, workers: int | None = None, seconds: float = 2.0) -> Speed:
    """Decode the domain, then load batches of 32 for so many seconds each way."""
    images, begin = sum(map(len, data.splits().values())), time.perf_counter()
    cache = cache_domain(data, spec, workers=workers)
    decode = images / (time.perf_counter() - begin)
    train = Loader(cache.train, train_transform(data, spec), shuffle=True, workers=workers)
    evaluate = Loader(cache.val, eval_transform(data, spec), workers=workers)
    return Speed(decode, train.throughput(seconds), evaluate.throughput(seconds))


def main() -> None:
    """Measure the sources named on the command line, at 128 pixels."""
    spec = InputSpec((3, 128, 128), interpolation="bicubic")
    for source in sys.argv[1:] or ["digits", "letters", "solar-cells"]:
        speed = measure_speed(load_data(source), spec)
        print(
            f"{source}: decodes {speed.decode:.0f}, gives {speed.train:.0f} for training and "
            f"{speed.evaluate:.0f} for evaluation, images a second"
        )


if __name__ == "__main__":
    main()
