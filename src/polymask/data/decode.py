"""One image file or buffer to 8-bit RGB, upright, on an opaque ground; many of them by threads.

One image file or buffer to 8-bit RGB, upright, on an opaque ground.

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
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from polymask.errors import DataError
from polymask.nets.torchvision_guard import import_torchvision

if TYPE_CHECKING:
    from PIL.Image import Image


def require(module: str, remedy: str) -> Any:
    """Import `module`, or say which `pip install` brings it."""
    try:
        if module.partition(".")[0] == "torchvision":
            import_torchvision()
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{module} cannot be imported ({error}); pip install {remedy}") from error


def require_vision(module: str) -> Any:
    """Import `module` of pillow or torchvision."""
    return require(module, "'polymask[vision]'")


_ORIENTATION = 0x0112  # the EXIF tag
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N", "I")

# What Pillow's decoders raise on damaged files; OSError covers its own errors.
DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    RuntimeError,
    EOFError,
    IndexError,
    OverflowError,
    struct.error,
    zlib.error,
)


def decode(file: Path | bytes, origin: str, side: int | None = None) -> Image:
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


def to_rgb(image: Image, origin: str) -> Image:
    """Bring an opened image to 8-bit RGB, upright, over white."""
    pil = require_vision("PIL.Image")
    image = _upright(image)
    if image.mode in _SIXTEEN_BIT or image.mode == "F":
        image = pil.fromarray(_eight_bits(np.asarray(image), image.mode, origin))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = pil.alpha_composite(pil.new("RGBA", image.size, "white"), image)
    rgb: Image = image.convert("RGB")
    return rgb


def _upright(image: Image) -> Image:
    """Turn or mirror as EXIF says; a file whose EXIF cannot be read is taken as upright."""
    pil = require_vision("PIL.Image")
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except DAMAGED:
        orientation = 1
    turn = {
        2: pil.Transpose.FLIP_LEFT_RIGHT,
        3: pil.Transpose.ROTATE_180,
        4: pil.Transpose.FLIP_TOP_BOTTOM,
        5: pil.Transpose.TRANSPOSE,
        6: pil.Transpose.ROTATE_270,
        7: pil.Transpose.TRANSVERSE,
        8: pil.Transpose.ROTATE_90,
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
    return np.round(values.astype(np.float64) * (255 / top)).astype(np.uint8)


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
