"""From the bytes that a client sent to what a network sees, within limits."""

import base64
import binascii
import io
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from polymask.core.input import InputSpec
from polymask.data.decode import DAMAGED, to_rgb
from polymask.data.extras import require_vision
from polymask.data.feed import Feed
from polymask.errors import DataError
from polymask.serve.refusal import Refusal

# Pillow can open more, some by running other programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")

# What else Pillow's decoders raise on files that are made to hurt.
_MORE_DAMAGED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    TypeError,
    Warning,
)


def crop_of(feed: Feed, data: bytes, max_pixels: int) -> Tensor:
    """One image file as uint8 (3, side, side)."""
    pil = require_vision("PIL.Image")
    try:
        with pil.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise Refusal(
                    413,
                    f"an image of {width} × {height} pixels is too large; send at most {max_pixels:,} pixels",
                )
            image.draft(None, (2 * feed.shrink.side, 2 * feed.shrink.side))
            return feed.crop(to_rgb(image, "the image"))
    except Refusal:
        raise
    except (pil.DecompressionBombError, pil.DecompressionBombWarning) as error:
        raise Refusal(413, "the image has too many pixels") from error
    except pil.UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise Refusal(415, f"not an image that can be read; send one of {known}") from error
    except DataError as error:
        raise Refusal(422, str(error)) from error
    except (*DAMAGED, *_MORE_DAMAGED) as error:
        raise Refusal(422, "the image is damaged") from error


@lru_cache(maxsize=256)
def feed_of(spec: InputSpec) -> Feed:
    """The feed of a spec; libraries have few different ones."""
    return Feed(spec)


def crops_of(spec: InputSpec, images: Sequence[bytes], max_pixels: int) -> Tensor:
    """Image files as uint8 (N, 3, side, side)."""
    feed = feed_of(spec)
    crops = []
    for place, data in enumerate(images):
        try:
            crops.append(crop_of(feed, data, max_pixels))
        except Refusal as error:
            if len(images) == 1:
                raise
            raise Refusal(error.status, f"image {place + 1}: {error}") from error
    return torch.stack(crops)


def from_base64(text: str, place: int) -> bytes:
    """The bytes of an image in a JSON request."""
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise Refusal(422, f"image {place + 1} is not base64") from error
