"""GET, PUT and DELETE /v1/domains: the library, and what comes into it and leaves it."""

import asyncio
from pathlib import Path as File
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from polymask.serve import answers
from polymask.serve.engine import Engine
from polymask.serve.refusal import Refusal, busy
from polymask.serve.routes import problems
from polymask.serve.security import Allowed, read
from polymask.serve.settings import Settings

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"  # as polymask.library.model.check_name has it
Name = Annotated[str, Path(pattern=NAME, description="the domain's name")]

_UPLOADS = 2  # at a time
_PIECE = 1 << 20
_PACK = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def domains_router(settings: Settings, engine: Engine) -> APIRouter:
    """The addresses of the library."""
    routes = APIRouter()
    library, uploads = engine.library, asyncio.Semaphore(_UPLOADS)
    reader = Depends(Allowed(settings, write=False))
    writer = Depends(Allowed(settings, write=True))

    @routes.get(
        "/v1/domains",
        responses=problems(401, 421, 422, 503),
        dependencies=[reader],
        summary="The library, in order of names",
    )
    async def list_domains(
        after: Annotated[str, Query(max_length=100)] = "",
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    ) -> answers.DomainList:
        entries = await engine.aside(library.entries)
        rest = [entry for entry in entries if entry.name > after]
        shown = rest[:limit]
        rejected = library.rejected().items()
        return answers.DomainList(
            base=answers.BaseSummary(name=engine.base.name, fingerprint=engine.base.fingerprint),
            total=len(entries),
            domains=[answers.summary(entry, entry.key in engine.cache) for entry in shown],
            next=shown[-1].name if len(rest) > len(shown) else None,
            rejected=[answers.Rejected(name=name, reason=why) for name, why in rejected],
            writable=settings.allow_writes,
        )

    @routes.get(
        "/v1/domains/{name}",
        responses=problems(401, 404, 409, 421, 422, 503),
        dependencies=[reader],
        summary="One domain: classes, size, metrics, method",
    )
    async def show_domain(name: Name) -> answers.DomainDetail:
        entry = await engine.aside(library.find, name)
        return answers.detail(entry, entry.key in engine.cache)

    @routes.put(
        "/v1/domains/{name}",
        responses=problems(400, 401, 403, 404, 408, 409, 413, 415, 421, 422, 429, 503, 507)
        | {201: {"model": answers.DomainDetail}},
        dependencies=[writer],
        openapi_extra={"requestBody": {"required": True, "content": _PACK}},
        summary="Upload a pack: checked whole, then visible at once",
    )
    async def put_domain(name: Name, request: Request, response: Response) -> answers.DomainDetail:
        kind = request.headers.get("content-type", "application/octet-stream").partition(";")[0]
        if kind.strip().lower() != "application/octet-stream":
            raise Refusal(415, "send the pack as application/octet-stream")
        if uploads.locked():
            raise busy("other packs are being uploaded", 2)
        async with uploads:
            upload = await engine.aside(library.new_upload, name)
            try:
                await _receive(request, upload, engine, settings)
                created = await engine.aside(library.adopt, name, upload)
            finally:
                upload.unlink(missing_ok=True)
        response.status_code = 201 if created else 200
        entry = await engine.aside(library.find, name)
        return answers.detail(entry, entry.key in engine.cache)

    @routes.delete(
        "/v1/domains/{name}",
        status_code=204,
        responses=problems(401, 403, 404, 421, 422, 507),
        dependencies=[writer],
        summary="Delete a pack",
    )
    async def delete_domain(name: Name) -> None:
        await engine.aside(library.remove, name)

    return routes


async def _receive(request: Request, upload: File, engine: Engine, settings: Settings) -> None:
    """Write a body into a file, a megabyte at a time."""
    held = bytearray()

    def write() -> None:
        try:
            with upload.open("ab") as file:
                file.write(held)
        except OSError as error:
            raise Refusal(507, f"the pack cannot be stored: {error.strerror}") from error
        held.clear()

    async for piece in read(request, settings.max_pack_bytes, settings.upload_timeout):
        held += piece
        if len(held) >= _PIECE:
            await engine.aside(write)
    if held:
        await engine.aside(write)
