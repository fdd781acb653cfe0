"""Images with labels, in a fixed order, each decoded to 8-bit RGB, upright and over white, when it is asked for.

What Pillow opens in another form is brought to RGB like this:

* wrong way up: turned as its EXIF orientation says;
* animated: its first frame;
* CMYK, YCbCr, grey, palette, black and white: converted; colour profiles are not applied;
* 16-bit grey: the whole range scaled to 8 bits, v / 257, never clipped;
* floating point: scaled from [0, 1]; any other range is an error, since its white is unknown;
* transparent: laid over white.
"""

from __future__ import annotations

import importlib
import io
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np
from numpy.typing import NDArray

from polymask.errors import DataError
from polymask.files import digest

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]  # (H, W, 3)
# (N,) int64, positions in the domain's class names, -1 is unlabelled; (N, …) for other targets: see `core.target`
Labels = NDArray[Any]


def require(module: str, remedy: str) -> Any:
    """Import `module`, or say which `pip install` brings it."""
    try:
        if module.partition(".")[0] == "torchvision":
            from polymask.nets.zoo import import_torchvision  # it imports torch

            import_torchvision()
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{module} cannot be imported ({error}); pip install {remedy}") from error


def require_vision(module: str) -> Any:
    """Import `module` of pillow or torchvision."""
    return require(module, "'polymask[vision]'")


_LONGEST = 8  # times the shorter side
_STRIP = 256  # rows of a large image that are converted at a time
_ORIENTATION = 0x0112  # the EXIF tag
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N", "I")

# What Pillow's decoders raise on damaged files; OSError covers its own errors.
_PYTHONS = (OSError, SyntaxError, ValueError, RuntimeError, EOFError, ArithmeticError, LookupError, TypeError)
DAMAGED = (*_PYTHONS, AssertionError, AttributeError, struct.error, zlib.error)


def decode_image(file: Path | bytes, origin: str, side: int | None = None) -> Image:
    """Read an image.

    `origin` names it in errors. `side` says that no more than this shorter side is needed: a JPEG
    may then be decoded at a half, a quarter or an eighth, though never below twice `side`.
    """
    pil = require_vision("PIL.Image")
    try:
        with pil.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            if side is not None:
                image.draft(None, (2 * side, 2 * side))
            return to_rgb(image, origin)
    except DataError:
        raise
    except (pil.DecompressionBombError, pil.DecompressionBombWarning) as error:
        raise DataError(f"{origin}: {error}; make the image smaller or remove it") from error
    except FileNotFoundError as error:
        raise DataError(f"{origin}: the file is missing; restore it or remove its entry") from error
    except pil.UnidentifiedImageError as error:
        raise DataError(f"{origin}: not an image that Pillow can read; remove it") from error
    except DAMAGED as error:
        raise DataError(f"{origin}: damaged ({error}); restore or remove it") from error


def open_image(content: Any, origin: str, side: int | None = None) -> Image:
    """An image as 8-bit RGB, however it is given.

    `content` is a path, the bytes of a file, a Pillow image, or uint8 pixels: a tensor (C, H, W) or an array (H, W) or
    (H, W, C).
    """
    if isinstance(content, str | Path):
        if Path(content).is_dir():
            raise DataError(f"{content} is a folder; give the files in it")
        return decode_image(Path(content), str(content), side)
    if isinstance(content, bytes):
        return decode_image(content, origin, side)
    pil = require_vision("PIL.Image")
    if isinstance(content, pil.Image):
        return to_rgb(content, origin)
    pixels = content if isinstance(content, np.ndarray) else _channels_last(content)
    if not isinstance(pixels, np.ndarray):
        raise DataError(
            f"{origin}: a {type(content).__name__} is not an image; give a path, a Pillow image or uint8 pixels"
        )
    if pixels.dtype != np.uint8:
        raise DataError(f"{origin}: pixels are {pixels.dtype}; give uint8 from 0 to 255, or a Pillow image")
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)) or 0 in pixels.shape:
        raise DataError(f"{origin}: {tuple(content.shape)} is not the shape of an image; give 1 or 3 channels")
    return to_rgb(pil.fromarray(np.ascontiguousarray(pixels)), origin)


def _channels_last(content: Any) -> NDArray[Any] | None:
    """A tensor (C, H, W) as an array (H, W, C); None where it is no tensor."""
    import torch

    if not isinstance(content, torch.Tensor):
        return None
    array: NDArray[Any] = content.detach().cpu().numpy()
    return array.transpose(1, 2, 0) if array.ndim == 3 else array


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
    w, h = min(width, _LONGEST * height), min(height, _LONGEST * width)
    left, top = (width - w) // 2, (height - h) // 2
    return image if (w, h) == image.size else image.crop((left, top, left + w, top + h))


def to_rgb(image: Image, origin: str) -> Image:
    """Bring an opened image to 8-bit RGB, upright, over white."""
    pil = require_vision("PIL.Image")
    image = _upright(image)
    if image.mode in _SIXTEEN_BIT or image.mode == "F":
        image = pil.fromarray(_eight_bits(np.asarray(image), image.mode, origin))
    if image.has_transparency_data:
        return _over_white(image)
    if image.mode == "RGB":  # a large photograph is not copied
        image.load()
        return image
    rgb: Image = image.convert("RGB")
    return rgb


def _over_white(image: Image) -> Image:
    """What is seen of a transparent image on white paper; by strips, because a large one takes much memory."""
    pil = require_vision("PIL.Image")
    whole: Image = pil.new("RGB", image.size)
    for top in range(0, image.height, _STRIP):
        strip = image.crop((0, top, image.width, min(top + _STRIP, image.height))).convert("RGBA")
        strip = pil.alpha_composite(pil.new("RGBA", strip.size, "white"), strip)
        whole.paste(strip.convert("RGB"), (0, top))
    return whole


def _upright(image: Image) -> Image:
    """Turn or mirror as EXIF says; a file whose EXIF cannot be read is taken as upright."""
    turns = require_vision("PIL.Image").Transpose
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except DAMAGED:
        return image
    turn = {
        2: turns.FLIP_LEFT_RIGHT,
        3: turns.ROTATE_180,
        4: turns.FLIP_TOP_BOTTOM,
        5: turns.TRANSPOSE,
        6: turns.ROTATE_270,
        7: turns.TRANSVERSE,
        8: turns.ROTATE_90,
    }.get(orientation)
    return image if turn is None else image.transpose(turn)


def _eight_bits(values: np.ndarray, mode: str, origin: str) -> np.ndarray:
    top = 1.0 if mode == "F" else 65535.0
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= top):  # written so that NaN fails too
        raise DataError(
            f"{origin}: values from {low:g} to {high:g} in mode {mode}, where 0 to {top:g} is "
            "expected; save it as an 8-bit or 16-bit image"
        )
    found = np.empty(values.shape, np.uint8)
    for start in range(0, len(values), _STRIP):
        found[start : start + _STRIP] = np.round(values[start : start + _STRIP].astype(np.float64) * (255 / top))
    return found


class Split(ABC):
    """Images with labels, in a fixed order. Reading one is safe from any thread."""

    def __init__(self, labels: Sequence[int] | Labels) -> None:
        self.labels = _checked_labels(labels)

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

    def relabelled(self, labels: Sequence[int] | Labels) -> Self:
        """The same images with other labels."""
        other = copy(self)
        other.labels = _checked_labels(labels)
        return other


def _checked_labels(labels: Sequence[int] | Labels) -> Labels:
    """Classes as int64 (N,); a row for each image stays one."""
    found = np.asarray(labels)
    if found.ndim < 2:
        return found.astype(np.int64).reshape(-1)
    return found.astype(np.float64 if found.dtype.kind == "f" else np.int64)


@final
class FileSplit(Split):
    """Images in files, decoded when asked for."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int] | Labels) -> None:
        super().__init__(labels)
        self.files = tuple(files)

    def image(self, index: int, side: int | None = None) -> Image:
        return decode_image(self.files[index], self.origin(index), side)

    def origin(self, index: int) -> str:
        return str(self.files[index])

    def fingerprint(self) -> str:
        return digest(*(stamp(file) for file in self.files))


class WrappedSplit(Split):
    """Images of another library's dataset, read one at a time by `read(index)`.

    `read` gives what `open_image` takes. `fingerprint` is called
    only when a cache on disk asks for it.
    """

    def __init__(
        self, name: str, read: Callable[[int], Any], labels: Sequence[int] | Labels, fingerprint: Callable[[], str]
    ) -> None:
        super().__init__(labels)
        self.name, self._read, self._fingerprint = name, read, fingerprint

    def image(self, index: int, side: int | None = None) -> Image:
        try:
            content = self._read(index)
        except DAMAGED as error:
            raise DataError(f"{self.origin(index)}: damaged ({error}); restore it") from error
        return open_image(content, self.origin(index), side)

    def origin(self, index: int) -> str:
        return f"{self.name} #{index}"

    def fingerprint(self) -> str:
        return self._fingerprint()


@final
class ArraySplit(WrappedSplit):
    """Images in one uint8 array (N, H, W) or (N, H, W, 3)."""

    def __init__(self, name: str, images: NDArray[np.uint8], labels: Sequence[int] | Labels) -> None:
        def read(index: int) -> Image:
            image: Image = require_vision("PIL.Image").fromarray(images[index])
            return image

        super().__init__(name, read, labels, lambda: digest(str(images.shape), images.tobytes()))


@final
class SubsetSplit(Split):
    """Some images of another split, in the order of `indices`."""

    def __init__(self, whole: Split, indices: NDArray[np.int64]) -> None:
        super().__init__(whole.labels[indices])
        self.whole, self.indices = whole, indices

    def image(self, index: int, side: int | None = None) -> Image:
        return self.whole.image(int(self.indices[index]), side)

    def origin(self, index: int) -> str:
        return self.whole.origin(int(self.indices[index]))

    def fingerprint(self) -> str:
        return digest(self.whole.fingerprint(), self.indices.tobytes())


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

    def image(self, index: int, side: int | None = None) -> Image:
        part, place = self._locate(index)
        return part.image(place, side)

    def origin(self, index: int) -> str:
        part, place = self._locate(index)
        return part.origin(place)

    def fingerprint(self) -> str:
        return digest(*(part.fingerprint() for part in self.parts))


def stamp(file: Path) -> str:
    """What changes when a file's content does: its path, size and time of writing."""
    try:
        status = file.stat()
    except OSError:
        return f"{file.absolute()} missing"
    return f"{file.absolute()} {status.st_size} {status.st_mtime_ns}"
