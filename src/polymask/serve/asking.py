"""What a client asks: images with a domain's name, as multipart/form-data or as JSON."""

import asyncio
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from polymask.serve.forms import parse_form
from polymask.serve.images import from_base64
from polymask.serve.refusal import Refusal
from polymask.serve.security import read
from polymask.serve.settings import Settings

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
