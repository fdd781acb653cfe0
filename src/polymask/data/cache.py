"""Decoded images: each is decoded once, made small, and kept as bytes, in memory or in a file.

    pixels of image 0, image 1, …    uint8, (H, W, 3) each
    sizes                            int64 (N, 2), H and W
    N                                int64
    b"polymask"                      8 bytes: the file is whole

Filling a cache reads every image, so a damaged file is found before training begins, and all of
them are named at once.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from polymask.core.input import InputSpec
from polymask.data.images import DomainData
from polymask.data.split import JoinedSplit, Pixels, Shrink, Split, require_vision
from polymask.errors import DataError
from polymask.files import digest

Progress = Callable[[int, int], None]  # images done, images in all

_FORMAT, _MAGIC = "polymask pixels 1", b"polymask"
_FOOT = 8 + len(_MAGIC)


def write_pixels(path: Path, images: Iterable[Pixels]) -> None:
    """Write images as they come; none is held."""
    sizes = []
    with path.open("wb") as file:
        for image in images:
            file.write(np.ascontiguousarray(image).data)
            sizes.append(image.shape[:2])
        file.write(np.array(sizes, dtype="<i8").tobytes())
        file.write(len(sizes).to_bytes(8, "little") + _MAGIC)


def open_pixels(path: Path) -> list[Pixels] | None:
    """Map a file's images into memory; None where there is no whole file."""
    if not path.is_file() or (end := path.stat().st_size) < _FOOT:
        return None
    # Copy on write, because torch warns of arrays that it may not write.
    content = np.asarray(np.memmap(path, dtype=np.uint8, mode="c"))
    foot = content[-_FOOT:].tobytes()
    count = int.from_bytes(foot[:8], "little")
    start = end - _FOOT - 16 * count
    if foot[8:] != _MAGIC or start < 0:
        return None
    sizes = np.frombuffer(content[start : end - _FOOT].tobytes(), dtype="<i8").reshape(count, 2)
    ends = np.cumsum(3 * sizes.prod(axis=1))
    if count and ends[-1] != start:
        return None
    return [
        content[stop - 3 * height * width : stop].reshape(height, width, 3)
        for stop, (height, width) in zip(ends.tolist(), sizes.tolist(), strict=True)
    ]


class Cache:
    """The images of a split as uint8 tensors, with its labels.

    An image that is not held (None) is decoded again each time: that is how a limit on memory is
    kept. What `image` gives is the same in either case.
    """

    def __init__(self, split: Split, shrink: Shrink, held: Sequence[Pixels | None]) -> None:
        self.split, self.shrink, self.held = split, shrink, held
        self.labels = torch.from_numpy(split.labels.copy())  # (N, …)

    def __len__(self) -> int:
        return len(self.held)

    def image(self, index: int) -> Tensor:
        """One image: uint8 (3, H, W). Do not write into it."""
        pixels = self.held[index]
        if pixels is None:
            pixels = self.shrink(self.split.image(index, self.shrink.side))
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def thumbnail(self, index: int, side: int = 128) -> bytes:
        """One image as a PNG file of at most `side` × `side` pixels."""
        from PIL import Image

        picture = Image.fromarray(self.image(index).permute(1, 2, 0).contiguous().numpy())
        picture.thumbnail((side, side))
        png = io.BytesIO()
        picture.save(png, "PNG")
        return png.getvalue()

    @property
    def nbytes(self) -> int:
        """Bytes of the images that are held."""
        return sum(pixels.nbytes for pixels in self.held if pixels is not None)


@dataclass(frozen=True)
class DomainCache:
    """The caches of a domain's labelled splits."""

    train: Cache
    val: Cache
    test: Cache | None = None

    @property
    def train_val(self) -> Cache:
        """Train and val together, for a final training; nothing is copied."""
        both = (self.train, self.val)
        held = [pixels for cache in both for pixels in cache.held]
        return Cache(JoinedSplit(*(cache.split for cache in both)), self.train.shrink, held)


Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int, ahead: int
) -> Generator[Result, None, None]:
    """Yield work(item) for each item in turn, with at most `ahead` results waiting.

    An exception of `work` is raised where its result would have come. Closing the iterator early
    drops what has not begun and waits for what has, so no thread is left behind.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="polymask-data")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def default_workers() -> int:
    """One thread for each core, eight at most."""
    return min(8, os.cpu_count() or 1)


def short_side(spec: InputSpec) -> int:
    """The shorter side that images are resized to before a crop: side / crop."""
    return round(spec.side / spec.crop)


def shrink_of(spec: InputSpec) -> Shrink:
    """How images are kept for what is fed by `spec`."""
    side = spec.side if spec.squash else short_side(spec)
    return Shrink(side, spec.squash or spec.square, spec.interpolation)


def cache_domain(
    data: DomainData,
    spec: InputSpec,
    *,
    folder: Path | None = None,
    memory: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> DomainCache:
    """Decode a domain's labelled images, or raise one DataError that names all the damaged ones.

    With `folder` the pixels are kept in files there, mapped into memory, and found again by the next run unless an
    image has changed. Without it they are held in memory: the first `memory` bytes of them, or all.
    """
    splits, shrink = list(data.splits().values()), shrink_of(replace(spec, squash=data.squash))
    caches = cache_splits(splits, shrink, folder=folder, memory=memory, workers=workers, progress=progress)
    return DomainCache(*caches)


def cache_splits(
    splits: Sequence[Split],
    shrink: Shrink,
    *,
    folder: Path | None = None,
    memory: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Cache]:
    """Decode splits; see `cache_domain`."""
    filling = _Filling(shrink, workers or default_workers(), sum(map(len, splits)), progress)
    caches = []
    for split in splits:
        held = filling.in_memory(split, memory) if folder is None else filling.on_disk(split, folder)
        caches.append(Cache(split, shrink, held))
        memory = None if memory is None else memory - caches[-1].nbytes
    if filling.bad:
        first = "\n  ".join(filling.bad[:10])
        more = f"\n  and {len(filling.bad) - 10} more" if len(filling.bad) > 10 else ""
        raise DataError(f"{len(filling.bad)} images cannot be used:\n  {first}{more}")
    return caches


def check(data: DomainData, *, workers: int | None = None, progress: Progress | None = None) -> None:
    """Decode every image and keep none; raise one DataError that names all the damaged ones."""
    cache_splits(list(data.splits().values()), Shrink(1), memory=0, workers=workers, progress=progress)


class _Filling:
    """The decoding of several splits, and what went wrong in it."""

    def __init__(self, shrink: Shrink, workers: int, total: int, progress: Progress | None) -> None:
        self.shrink, self.workers, self.total, self.progress = shrink, workers, total, progress
        self.done = 0
        self.bad: list[str] = []

    def in_memory(self, split: Split, memory: int | None) -> list[Pixels | None]:
        held: list[Pixels | None] = []
        for pixels in self._decoded(split):
            if memory is not None:
                memory -= pixels.nbytes
            held.append(pixels if memory is None or memory >= 0 else None)
        return held

    def on_disk(self, split: Split, folder: Path) -> Sequence[Pixels | None]:
        version = require_vision("PIL").__version__
        file = folder / f"{digest(_FORMAT, version, repr(self.shrink), split.fingerprint())}.pixels"
        held = open_pixels(file)
        if held is not None:
            self._report(len(split))
            return held
        unfinished = file.with_name(f".{file.name}.{uuid4().hex}.tmp")  # other threads may be writing the same
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                write_pixels(unfinished, self._decoded(split))
                if not self.bad:
                    unfinished.replace(file)
            finally:
                unfinished.unlink(missing_ok=True)
        except OSError as error:
            raise DataError(f"cannot write the cache {file} ({error}); make room, or give another folder") from error
        return open_pixels(file) or []

    def _decoded(self, split: Split) -> Iterator[Pixels]:
        """The good images in order; the others are noted."""

        def decode(index: int) -> Pixels | str:
            try:
                return self.shrink(split.image(index, self.shrink.side))
            except DataError as error:
                return str(error)

        for result in in_order(decode, range(len(split)), self.workers, 4 * self.workers):
            self._report(1)
            if isinstance(result, str):
                self.bad.append(result)
            else:
                yield result

    def _report(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)
