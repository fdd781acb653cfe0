"""What a client asks: images with a domain's name, as multipart/form-data or as JSON, within limits."""

import asyncio
import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from torch import Tensor

from polymask.core.input import InputSpec
from polymask.data.preprocess import Preprocess
from polymask.data.split import DAMAGED, require_vision, to_rgb
from polymask.errors import DataError
from polymask.serve.security import read
from polymask.serve.settings import Refusal, Settings

_FIELD_BYTES = 1024  # of a part that is no file


@dataclass
class Part:
    """One field of a form; a file where it has a file's name."""

    name: str = ""
    is_file: bool = False
    data: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        """The value of a part that is no file."""
        if len(self.data) > _FIELD_BYTES:
            raise Refusal(422, f"the field {self.name[:50]!r} is too long")
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Refusal(422, f"the field {self.name[:50]!r} is not UTF-8") from error


def parse_form(content_type: str, body: bytes, max_parts: int) -> list[Part]:
    """The parts of a form, in order."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise Refusal(400, "the form cannot be read: its Content-Type names no boundary")
    reader = _Reader(max_parts)
    try:
        parser = MultipartParser(boundary, reader.callbacks())  # type: ignore[arg-type]
        parser.write(body)
    except FormParserError as error:
        raise Refusal(400, "the form cannot be read: it is malformed") from error
    if not reader.ended:
        raise Refusal(400, "the form cannot be read: it has no end")
    return reader.parts


class _Reader:
    """What the parser finds, put together."""

    def __init__(self, max_parts: int) -> None:
        self.parts: list[Part] = []
        self.ended = False
        self._max_parts = max_parts
        self._header, self._value = bytearray(), bytearray()

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._check_name,
            "on_part_data": lambda data, start, end: self.parts[-1].data.extend(data[start:end]),
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.parts) >= self._max_parts:
            raise Refusal(422, f"the form has more than {self._max_parts} parts")
        self.parts.append(Part())

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self.parts[-1].name = options.get(b"name", b"").decode("utf-8", "replace")
            self.parts[-1].is_file = b"filename" in options
        self._header.clear()
        self._value.clear()

    def _check_name(self) -> None:
        if not self.parts[-1].name:
            raise Refusal(400, "the form cannot be read: a part has no name")

    def _end(self) -> None:
        self.ended = True


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


def crop_of(feed: Preprocess, data: bytes, max_pixels: int) -> Tensor:
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
            return feed.piece(to_rgb(image, "the image"))
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
def feed_of(spec: InputSpec) -> Preprocess:
    """The feed of a spec; libraries have few different ones."""
    return Preprocess(spec)


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


_TOP = 5


class PredictBody(BaseModel):
    """Images for one domain."""

    model_config = ConfigDict(extra="forbid")

    domain: str = Field(min_length=1, max_length=100, description="the domain's name")
    images: list[str] = Field(min_length=1, description="image files, each in base64")
    top_k: int = Field(default=_TOP, ge=1, le=1000, description="how many classes to name")


class AutoBody(BaseModel):
    """Images for the domain that fits best."""

    model_config = ConfigDict(extra="forbid")

    images: list[str] = Field(min_length=1, description="image files, each in base64")
    domains: list[str] | None = Field(
        default=None, min_length=1, description="the domains to compare; all where none is named"
    )
    top_k: int = Field(default=_TOP, ge=1, le=1000, description="how many classes to name")


@dataclass(frozen=True)
class Asked:
    """A request, read and checked."""

    images: list[bytes]
    top_k: int
    domain: str = ""
    domains: list[str] | None = None


async def read_asked(request: Request, settings: Settings, body_of: type[PredictBody] | type[AutoBody]) -> Asked:
    """Read a body, in either form."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", "multipart/form-data"):
        raise Refusal(415, "send multipart/form-data or application/json")
    pieces = read(request, settings.max_body_bytes, settings.read_timeout)
    body = b"".join([piece async for piece in pieces])
    if kind == "application/json":
        return await asyncio.to_thread(_from_json, body, settings, body_of)
    given = request.headers["content-type"]
    return await asyncio.to_thread(_from_form, body, given, settings, body_of)


def _from_json(body: bytes, settings: Settings, body_of: type[PredictBody] | type[AutoBody]) -> Asked:
    try:
        asked = body_of.model_validate_json(body)
    except ValidationError as error:
        raise _explained(error) from error
    _check_count(len(asked.images), settings)
    images = [from_base64(text, place) for place, text in enumerate(asked.images)]
    return _asked(asked, images)


def _from_form(
    body: bytes,
    content_type: str,
    settings: Settings,
    body_of: type[PredictBody] | type[AutoBody],
) -> Asked:
    images: list[bytes] = []
    fields: dict[str, Any] = {}
    for part in parse_form(content_type, body, settings.max_images + settings.auto_domains + 8):
        if part.is_file:
            if part.name not in ("image", "images"):
                raise Refusal(422, f"files go into the field `images`, not {part.name[:50]!r}")
            images.append(bytes(part.data))
        elif part.name == "domains":
            fields.setdefault("domains", []).extend(part.text.split(","))
        elif part.name in fields or part.name in ("image", "images"):
            raise Refusal(422, f"{part.name[:50]!r} is given twice, or is no file")
        else:
            fields[part.name] = part.text
    _check_count(len(images), settings)
    try:
        # The names are checked like those of JSON; the images are there already.
        asked = body_of.model_validate(fields | {"images": ["-"]})
    except ValidationError as error:
        raise _explained(error) from error
    return _asked(asked, images)


def _asked(asked: PredictBody | AutoBody, images: list[bytes]) -> Asked:
    if isinstance(asked, PredictBody):
        return Asked(images, asked.top_k, domain=asked.domain)
    return Asked(images, asked.top_k, domains=asked.domains)


def _check_count(count: int, settings: Settings) -> None:
    if count == 0:
        raise Refusal(422, "there is no image; send one or more in `images`")
    if count > settings.max_images:
        raise Refusal(422, f"{count} images are too many; send at most {settings.max_images}")


def _explained(error: ValidationError) -> Refusal:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))[:100]
    return Refusal(422, f"{place}: {first['msg']}" if place else str(first["msg"]))
