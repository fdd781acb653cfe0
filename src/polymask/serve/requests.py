"""What a client sends: images with a domain's name, as multipart/form-data or as JSON, within limits."""

import asyncio
import binascii
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from polymask.serve.security import body_pieces
from polymask.serve.settings import Refusal, Settings

_FIELD_BYTES = 1024  # of a field that is not a file
_LARGE = 1 << 20  # bytes of a body: it takes long to parse
_MOST = 10_000  # entries of any list: no setting allows more images or domains


@dataclass
class FormField:
    """One field of a form; a file where it has a file's name."""

    name: str = ""
    is_file: bool = False
    data: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        """The value of a field that is not a file."""
        if len(self.data) > _FIELD_BYTES:
            raise Refusal(422, f"the field {self.name[:50]!r} is too long")
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Refusal(422, f"the field {self.name[:50]!r} is not UTF-8") from error


def parse_form(content_type: str, body: bytes | bytearray, max_fields: int) -> list[FormField]:
    """The fields of a form, in order."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise Refusal(400, "the form cannot be read: its Content-Type names no boundary")
    fields: list[FormField] = []
    header, value = bytearray(), bytearray()
    ended = False

    def begin() -> None:
        if len(fields) >= max_fields:
            raise Refusal(422, f"the form has more than {max_fields} parts")
        fields.append(FormField())

    def end_header() -> None:
        if header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(value))
            fields[-1].name = options.get(b"name", b"").decode("utf-8", "replace")
            fields[-1].is_file = b"filename" in options
        header.clear()
        value.clear()

    def check_name() -> None:
        if not fields[-1].name:
            raise Refusal(400, "the form cannot be read: a part has no name")

    def end() -> None:
        nonlocal ended
        ended = True

    callbacks: Any = {
        "on_part_begin": begin,
        "on_header_field": lambda data, start, stop: header.extend(data[start:stop]),
        "on_header_value": lambda data, start, stop: value.extend(data[start:stop]),
        "on_header_end": end_header,
        "on_headers_finished": check_name,
        "on_part_data": lambda data, start, stop: fields[-1].data.extend(memoryview(data)[start:stop]),
        "on_end": end,
    }
    try:
        MultipartParser(boundary, callbacks).write(cast("bytes", body))
    except FormParserError as error:
        raise Refusal(400, "the form cannot be read: it is malformed") from error
    if not ended:
        raise Refusal(400, "the form cannot be read: it has no end")
    return fields


class ImagesBody(BaseModel):
    """Images, and how many classes to name for each."""

    model_config = ConfigDict(extra="forbid")

    images: list[str] = Field(min_length=1, max_length=_MOST, fail_fast=True, description="image files, each in base64")
    top_k: int = Field(default=5, ge=1, le=1000, description="how many classes to name")


class PredictBody(ImagesBody):
    """Images for one domain."""

    domain: str = Field(min_length=1, max_length=100, description="the domain's name")


class AutoBody(ImagesBody):
    """Images for the domain that fits best."""

    domains: list[str] | None = Field(
        default=None,
        min_length=1,
        max_length=_MOST,
        fail_fast=True,
        description="the domains to compare; by default all of them",
    )


Body = TypeVar("Body", bound=ImagesBody)


async def read_body(
    request: Request, settings: Settings, kind: type[Body], take: Callable[[int], None], parsing: asyncio.Lock
) -> tuple[Body, list[bytes | bytearray]]:
    """A body in either form, checked, and the files of its images; large ones are parsed one at a time."""
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in ("application/json", "multipart/form-data"):
        raise Refusal(415, "send multipart/form-data or application/json")
    limit, seconds = settings.max_body_bytes, settings.read_timeout
    data = bytearray()
    async for piece in body_pieces(request, limit, seconds):
        take(len(piece))
        data += piece
    if media_type == "application/json":
        parse = partial(_from_json, data, kind)
    else:
        parse = partial(_from_form, data, content_type, settings.max_images + settings.auto_domains + 8, kind)
    try:
        async with parsing if len(data) > _LARGE else nullcontext():  # Python runs one thread at a time
            body, images = await asyncio.to_thread(parse)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))[:100]
        raise Refusal(422, f"{place}: {first['msg']}" if place else str(first["msg"])) from error
    if not images:
        raise Refusal(422, "there is no image; send one or more in `images`")
    if len(images) > settings.max_images:
        raise Refusal(422, f"{len(images)} images are too many; send at most {settings.max_images}")
    return body, images


def _from_json(data: bytearray, kind: type[Body]) -> tuple[Body, list[bytes | bytearray]]:
    body = kind.model_validate_json(data)
    images: list[bytes | bytearray] = []
    for place, text in enumerate(body.images):
        try:
            images.append(binascii.a2b_base64(text, strict_mode=True))
        except ValueError as error:  # binascii.Error, or a text that is not ASCII
            raise Refusal(422, f"image {place + 1} is not base64") from error
        body.images[place] = ""  # not kept twice
    return body, images


def _from_form(
    data: bytearray, content_type: str, max_fields: int, kind: type[Body]
) -> tuple[Body, list[bytes | bytearray]]:
    images: list[bytes | bytearray] = []
    values: dict[str, Any] = {}
    for part in parse_form(content_type, data, max_fields):
        if part.is_file:
            if part.name not in ("image", "images"):
                raise Refusal(422, f"files go into the field `images`, not {part.name[:50]!r}")
            images.append(part.data)
        elif part.name == "domains":
            values.setdefault("domains", []).extend(part.text.split(","))
        elif part.name in values or part.name in ("image", "images"):
            raise Refusal(422, f"{part.name[:50]!r} is given twice, or is not a file")
        else:
            values[part.name] = part.text
    # The values are checked like those of JSON; the images are there already.
    return kind.model_validate(values | {"images": ["-"]}), images
