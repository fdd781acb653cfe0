"""One split of a domain: images with labels, in a fixed order."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from polymask.data.decode import DAMAGED, decode, to_rgb
from polymask.data.extras import require_vision
from polymask.errors import DataError

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
        self,
        name: str,
        read: Callable[[int], Any],
        labels: Sequence[int] | Labels,
        fingerprint: Callable[[], str],
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


def digest(*parts: str | bytes) -> str:
    """A sha256 over parts, each preceded by its length so that no two lists look alike."""
    total = hashlib.sha256()
    for part in parts:
        content = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        total.update(len(content).to_bytes(8, "little") + content)
    return total.hexdigest()


def stamp(file: Path) -> str:
    """What changes when a file's content does: its path, size and time of writing."""
    try:
        status = file.stat()
    except OSError:
        return f"{file.absolute()} missing"
    return f"{file.absolute()} {status.st_size} {status.st_mtime_ns}"
