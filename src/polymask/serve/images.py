"""From the bytes that a client sent to what a network sees, within limits."""

import base64
import binascii
import io
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from polymask.data.cache import short_side
from polymask.data.decode import DAMAGED, to_rgb
from polymask.data.extras import require_vision
from polymask.data.shrink import Shrink
from polymask.data.transforms import CentreCrop, Transform, Whole
from polymask.errors import DataError
from polymask.input import InputSpec
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


class Feed:
    """How one domain's images are cut and scaled: as in its evaluation."""

    def __init__(self, spec: InputSpec) -> None:
        short = spec.side if spec.squash else short_side(spec)
        self.shrink = Shrink(short, spec.squash, spec.interpolation)
        crop = Whole if spec.squash else partial(CentreCrop, short=short)
        self.transform = Transform(crop(spec.side, spec.interpolation), spec)

    def crop(self, data: bytes, max_pixels: int) -> Tensor:
        """One image file as uint8 (3, side, side)."""
        pil = require_vision("PIL.Image")
        try:
            with pil.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > max_pixels:
                    raise Refusal(
                        413,
                        f"an image of {width} × {height} pixels is too large; "
                        f"send at most {max_pixels:,} pixels",
                    )
                image.draft(None, (2 * self.shrink.side, 2 * self.shrink.side))
                rgb = to_rgb(image, "the image")
            pixels = torch.from_numpy(self.shrink(rgb)).permute(2, 0, 1)
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
        return self.transform.crop(pixels, np.random.default_rng(0))  # a centre crop draws nothing

    def batch(self, crops: Tensor) -> Tensor:
        """Crops uint8 (N, 3, side, side) as the network sees them: float32 (N, C, side, side)."""
        return self.transform.batch(crops.unbind())


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
            crops.append(feed.crop(data, max_pixels))
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
