"""What each address does."""

import asyncio
import os
import time
from http import HTTPStatus
from pathlib import Path as File
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import PlainTextResponse

from polymask.files import NAME
from polymask.report.canvas import variables
from polymask.serve import responses as answers
from polymask.serve.engine import Engine
from polymask.serve.requests import AutoBody, PredictBody, read_asked
from polymask.serve.responses import CONTENT_TYPE, Metrics, Problem
from polymask.serve.security import Allowed, Bodies, read
from polymask.serve.settings import Refusal, Settings, busy

Responses = dict[int | str, dict[str, Any]]


def problems(*statuses: int) -> Responses:
    """The answers other than success, for the OpenAPI."""
    return {status: {"model": Problem, "description": HTTPStatus(status).phrase} for status in statuses}


Name = Annotated[str, Path(pattern=f"^{NAME}$", description="the domain's name")]

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


def operations_router(settings: Settings, engine: Engine, metrics: Metrics) -> APIRouter:
    """The addresses that tell how the server is."""
    routes = APIRouter(responses=problems(421))

    @routes.get("/healthz", summary="200 while the process works")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/readyz", responses=problems(503), summary="200 while requests are welcome")
    async def readyz() -> dict[str, str]:
        if not engine.batcher.alive:
            raise Refusal(503, "the server is about to stop")
        if not await engine.aside(os.access, settings.library, os.R_OK | os.X_OK):
            raise Refusal(503, "the library's folder cannot be read")
        return {"status": "ready"}

    @routes.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses=problems(401),
        dependencies=[Depends(Allowed(settings, write=False))],
        summary="Numbers for Prometheus",
    )
    async def prometheus() -> Response:
        metrics.observe_engine(engine)
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    return routes


PAGES = File(__file__).parent / "pages"


def pages_router() -> APIRouter:
    """The page, its style and its script."""
    routes = APIRouter(include_in_schema=False)
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {variables('dark')} }} }}"
    html, style, script = (_read(name) for name in ("index.html", "page.css", "page.js"))
    style = f":root {{ {variables('light')} }}\n{dark}\n{style}"

    @routes.get("/")
    async def index() -> Response:
        return _page(html, "text/html")

    @routes.get("/page.css")
    async def css() -> Response:
        return _page(style, "text/css")

    @routes.get("/page.js")
    async def js() -> Response:
        return _page(script, "text/javascript")

    return routes


def _read(name: str) -> str:
    return (PAGES / name).read_text("utf-8")


def _page(text: str, kind: str) -> Response:
    return Response(text, media_type=kind, headers={"Cache-Control": "no-cache"})


_PROBLEMS = problems(400, 401, 404, 408, 409, 413, 415, 421, 422, 429, 503)
_NAMES = {"type": "string", "description": "names, with commas between them"}


def predictions_router(settings: Settings, engine: Engine, metrics: Metrics) -> APIRouter:
    """The addresses that say what is on images."""
    routes = APIRouter(dependencies=[Depends(Allowed(settings, write=False))], responses=_PROBLEMS)
    bodies = Bodies(settings)

    @routes.post(
        "/v1/predict",
        openapi_extra=_body_of(PredictBody, domain={"type": "string"}),
        summary="What one domain sees on images",
    )
    async def predict(request: Request) -> answers.Prediction:
        began = time.perf_counter()
        with bodies.room_for(request):
            asked = await read_asked(request, settings, PredictBody)
            request.state.note = {"domain": asked.domain, "images": len(asked.images)}
            answer = await engine.predict(asked.domain, asked.images)
        metrics.observe_engine(engine)
        return answers.prediction(answer, asked.top_k, 1000 * (time.perf_counter() - began))

    @routes.post(
        "/v1/predict/auto",
        openapi_extra=_body_of(AutoBody, domains=_NAMES),
        summary="What the domain that fits best sees on images",
    )
    async def predict_auto(request: Request) -> answers.AutoPrediction:
        began = time.perf_counter()
        with bodies.room_for(request):
            asked = await read_asked(request, settings, AutoBody)
            request.state.note = {"images": len(asked.images)}
            found = await engine.predict_best(asked.domains, asked.images)
        metrics.observe_engine(engine)
        return answers.auto_prediction(found, asked.top_k, 1000 * (time.perf_counter() - began))

    return routes


def _body_of(model: type[PredictBody] | type[AutoBody], **fields: Any) -> dict[str, Any]:
    """The OpenAPI of a body that may be a form or JSON."""
    files = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
    top_k = {"type": "integer", "minimum": 1, "maximum": 1000}
    form = {
        "type": "object",
        "properties": {"images": files, "top_k": top_k, **fields},
        "required": ["images", *(name for name in fields if name == "domain")],
    }
    content = {
        "multipart/form-data": {"schema": form},
        "application/json": {"schema": model.model_json_schema()},
    }
    return {"requestBody": {"required": True, "content": content}}
