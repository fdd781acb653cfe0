"""One split of a domain: images with labels, in a fixed order; and seeded splits that keep the classes' proportions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from polymask.data.decode import DAMAGED, decode, require_vision, to_rgb
from polymask.errors import DataError
from polymask.files import digest

if TYPE_CHECKING:
    from PIL.Image import Image

Labels = NDArray[np.int64]  # (N,), positions in the domain's class names; -1 is unlabelled


class Split(ABC):
    """Images with labels, in a fixed order. Reading one is safe from any thread."""

    def __init__(self, labels: Sequence[int] | Labels) -> None:
        self.labels: Labels = np.asarray(labels, dtype=np.int64).reshape(-1)

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def image(self, index: int, side: int | None = None) -> Image:
        """Decode one image: 8-bit RGB, upright, over white.

        `side` is the shorter side that the caller needs; a decoder may use it to save work.
        """

    @abstractmethod
    def origin(self, index: int) -> str:
        """Where the image comes from: a path, or a name such as "digits #17"."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash that changes whenever the images or their order may have changed."""


@final
class FileSplit(Split):
    """Images in files, decoded when asked for."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int] | Labels) -> None:
        super().__init__(labels)
        self.files = tuple(files)

    @override
    def image(self, index: int, side: int | None = None) -> Image:
        return decode(self.files[index], self.origin(index), side)

    @override
    def origin(self, index: int) -> str:
        return str(self.files[index])

    @override
    def fingerprint(self) -> str:
        return digest(*(stamp(file) for file in self.files))


@final
class ArraySplit(Split):
    """Images in one uint8 array (N, H, W) or (N, H, W, 3)."""

    def __init__(self, name: str, images: NDArray[np.uint8], labels: Sequence[int] | Labels) -> None:
        super().__init__(labels)
        self.name, self.images = name, images

    @override
    def image(self, index: int, side: int | None = None) -> Image:
        rgb: Image = require_vision("PIL.Image").fromarray(self.images[index]).convert("RGB")
        return rgb

    @override
    def origin(self, index: int) -> str:
        return f"{self.name} #{index}"

    @override
    def fingerprint(self) -> str:
        return digest(str(self.images.shape), self.images.tobytes())


@final
class WrappedSplit(Split):
    """Images of another library's dataset, read one at a time by `read(index)`.

    `read` gives a Pillow image, or the bytes or the path of an image file. `fingerprint` is called
    only when a cache on disk asks for it.
    """

    def __init__(
        self, name: str, read: Callable[[int], Any], labels: Sequence[int] | Labels, fingerprint: Callable[[], str]
    ) -> None:
        super().__init__(labels)
        self.name, self._read, self._fingerprint = name, read, fingerprint

    @override
    def image(self, index: int, side: int | None = None) -> Image:
        try:
            content = self._read(index)
        except DAMAGED as error:
            raise DataError(f"{self.origin(index)}: damaged ({error}); restore it") from error
        if isinstance(content, bytes):
            return decode(content, self.origin(index), side)
        if isinstance(content, Path):
            return decode(content, str(content), side)
        return to_rgb(content, self.origin(index))

    @override
    def origin(self, index: int) -> str:
        return f"{self.name} #{index}"

    @override
    def fingerprint(self) -> str:
        return self._fingerprint()


@final
class SubsetSplit(Split):
    """Some images of another split, in the order of `indices`."""

    def __init__(self, whole: Split, indices: NDArray[np.int64]) -> None:
        super().__init__(whole.labels[indices])
        self.whole, self.indices = whole, indices

    @override
    def image(self, index: int, side: int | None = None) -> Image:
        return self.whole.image(int(self.indices[index]), side)

    @override
    def origin(self, index: int) -> str:
        return self.whole.origin(int(self.indices[index]))

    @override
    def fingerprint(self) -> str:
        return digest(self.whole.fingerprint(), self.indices.tobytes())


@final
class RelabelledSplit(Split):
    """The images of another split, with labels from elsewhere."""

    def __init__(self, whole: Split, labels: Sequence[int] | Labels) -> None:
        super().__init__(labels)
        self.whole = whole

    @override
    def image(self, index: int, side: int | None = None) -> Image:
        return self.whole.image(index, side)

    @override
    def origin(self, index: int) -> str:
        return self.whole.origin(index)

    @override
    def fingerprint(self) -> str:
        return self.whole.fingerprint()


@final
class JoinedSplit(Split):
    """Several splits one after another, such as train and val."""

    def __init__(self, *parts: Split) -> None:
        super().__init__(np.concatenate([part.labels for part in parts]))
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def _locate(self, index: int) -> tuple[Split, int]:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[part], index - int(self._ends[part]) + len(self.parts[part])

    @override
    def image(self, index: int, side: int | None = None) -> Image:
        part, place = self._locate(index)
        return part.image(place, side)

    @override
    def origin(self, index: int) -> str:
        part, place = self._locate(index)
        return part.origin(place)

    @override
    def fingerprint(self) -> str:
        return digest(*(part.fingerprint() for part in self.parts))


def stamp(file: Path) -> str:
    """What changes when a file's content does: its path, size and time of writing."""
    try:
        status = file.stat()
    except OSError:
        return f"{file.absolute()} missing"
    return f"{file.absolute()} {status.st_size} {status.st_mtime_ns}"


TRAIN_VAL_TEST = (0.70, 0.15, 0.15)
TRAIN_VAL = (0.85, 0.15)


def stratified(labels: Labels, shares: Sequence[float], seed: int) -> list[NDArray[np.int64]]:
    """Deal the indices of `labels` into parts, class by class.

    A part with share f gets floor(f n) or ceil(f n) of a class's n images, and the first part at
    least one. Each class is dealt by its own random numbers, so that adding a class leaves the
    others where they were. Indices are sorted within a part.
    """
    dealt: list[list[NDArray[np.int64]]] = [[] for _ in shares]
    for label in np.unique(labels):
        draw = np.random.default_rng([seed, int(label) + 1])
        members = draw.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(_quotas(len(members), shares, draw))
        for part, piece in zip(dealt, np.split(members, ends[:-1]), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)) for part in dealt]


def _quotas(count: int, shares: Sequence[float], draw: np.random.Generator) -> NDArray[np.int64]:
    """Whole numbers that add up to `count`, by largest remainder, ties by lot."""
    exact = np.asarray(shares) * count
    quotas = np.floor(exact + 1e-9).astype(np.int64)
    remainders = np.round(exact - quotas, 9)
    order = np.lexsort((draw.random(len(shares)), -remainders))
    quotas[order[: count - int(quotas.sum())]] += 1
    return quotas


def cut(split: Split, shares: Sequence[float], seed: int, name: str) -> list[Split]:
    """Cut a split into stratified parts, none of them empty."""
    parts: list[Split] = [SubsetSplit(split, indices) for indices in stratified(split.labels, shares, seed)]
    if not all(len(part) for part in parts):
        raise DataError(
            f"{name}: {len(split)} images in {len(np.unique(split.labels))} classes are too few to "
            f"cut into {len(parts)} parts; give at least 4 images of each class"
        )
    return parts


def complete(parts: dict[str, Split], seed: int, name: str) -> tuple[dict[str, Split], list[str]]:
    """Cut the parts that a source lacks out of its train, and say so.

    Train alone is cut 70 / 15 / 15; train with test gives 15 % of itself to val; train with val
    has no test.
    """
    if "val" in parts:
        return parts, []
    if "test" in parts:
        train, val = cut(parts["train"], TRAIN_VAL, seed, name)
        note = f"val is 15 % of each class of train (seed {seed})"
        return {"train": train, "val": val, "test": parts["test"]}, [note]
    train, val, test = cut(parts["train"], TRAIN_VAL_TEST, seed, name)
    note = f"cut into train, val and test by 70, 15 and 15 % of each class (seed {seed})"
    return {"train": train, "val": val, "test": test}, [note]


def limited(split: Split, limit: int, seed: int, name: str) -> Split:
    """At most `limit` images, in proportion to the classes and at least one of each.

    A larger limit keeps the images of a smaller one.
    """
    if limit >= len(split):
        return split
    classes = len(np.unique(split.labels))
    if limit < classes:
        raise DataError(f"{name}: limit {limit} is below its {classes} classes; raise the limit")
    ranks = np.empty(len(split), dtype=np.float64)  # any prefix in this order is stratified
    for label in np.unique(split.labels):
        draw = np.random.default_rng([seed, int(label) + 1])
        members = draw.permutation(np.flatnonzero(split.labels == label))
        ranks[members] = (np.arange(len(members)) + 0.5) / len(members)
        ranks[members[0]] = 0
    return SubsetSplit(split, np.sort(np.argsort(ranks, kind="stable")[:limit]))
