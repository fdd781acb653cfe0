"""The HTTP app: what each address does, and the parts of a server put together. See docs/serve.md."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, TypeVar

import fastapi
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from polymask import __version__
from polymask.core.base import Base
from polymask.errors import PackError
from polymask.files import NAME
from polymask.nets.zoo import load_base
from polymask.pack.format import inspect, packs_in
from polymask.report.page_parts import variables
from polymask.serve import responses as answers
from polymask.serve.batcher import Observe
from polymask.serve.engine import Engine
from polymask.serve.requests import AutoBody, ImagesBody, PredictBody, read_body
from polymask.serve.security import Allowed, Bodies, Gate, body_pieces, explain
from polymask.serve.settings import Refusal, ServeError, Settings, busy

R = TypeVar("R")
EngineOf = Callable[[Settings, Base, Observe], Engine]
Name = Annotated[str, fastapi.Path(pattern=f"^{NAME}$", description="the domain's name")]

PAGES = Path(__file__).parent / "pages"
_UPLOADS = 2  # at a time
_GONE = 499  # what proxies log where a client closed the connection before its answer
_PIECE = 1 << 20
_PACK = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_NAMES = {"type": "string", "description": "names, separated by commas"}


def open_base(settings: Settings) -> Base:
    """The base that is named, or the one of the library's first pack that can be read."""
    name = settings.base
    for path in [] if name else packs_in(settings.library):
        with suppress(PackError):
            name = inspect(path).manifest.base
            break
    if name is None:
        raise ServeError(f"{settings.library} has no pack that could say which base to load; give --base")
    return load_base(name, weights=settings.weights, device=settings.device)


class ServeApp(FastAPI):
    """The app behind its gate, which sees every request and every answer."""

    gate: Callable[[ASGIApp], ASGIApp]

    def build_middleware_stack(self) -> ASGIApp:
        return self.gate(super().build_middleware_stack())


def create_app(
    settings: Settings,
    base: Base | None = None,
    engine_of: EngineOf = Engine,
    closing: Callable[[], None] = lambda: None,
) -> FastAPI:
    """The ASGI app of a library; loads the base where none is given.

    `engine_of` makes what answers: by default the networks are run here. `closing` is called when the app shuts down,
    before it waits for what is under way.
    """
    metrics = answers.Metrics()
    engine = engine_of(settings, base or open_base(settings), metrics.observe_batch)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        closing()
        await engine.close()

    app = ServeApp(
        title="polymask",
        version=__version__,
        description="One resident base, many domains. Images in, classes out.",
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,  # below, for those who may read
    )
    app.gate = lambda inner: Gate(inner, settings, metrics.observe_request)
    app.state.engine, app.state.metrics = engine, metrics
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Request-ID"],
        )
    _explain_errors(app)
    app.include_router(predictions_router(settings, engine, metrics))
    app.include_router(domains_router(settings, engine))
    app.include_router(operations_router(settings, engine, metrics))
    app.include_router(pages_router())

    async def openapi() -> dict[str, Any]:
        return app.openapi()

    reader = Depends(Allowed(settings, write=False))
    app.add_api_route("/openapi.json", openapi, dependencies=[reader], include_in_schema=False)
    return app


def _explain_errors(app: FastAPI) -> None:
    def refusal_of(error: Exception) -> Refusal:
        if isinstance(error, Refusal):
            return error
        if isinstance(error, HTTPException):  # no route takes the request
            return Refusal(error.status_code, str(error.detail), headers=error.headers)
        if isinstance(error, RequestValidationError):
            first = error.errors()[0]
            return Refusal(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        return Refusal(500, "the server made a mistake; its log has more")

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return explain(refusal_of(error), request.state.request_id)

    for kind in (Refusal, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The answers other than success, for the OpenAPI."""
    return {status: {"model": answers.Problem, "description": HTTPStatus(status).phrase} for status in statuses}


def predictions_router(settings: Settings, engine: Engine, metrics: answers.Metrics) -> APIRouter:
    """The addresses that say what is on images."""
    routes = APIRouter(
        dependencies=[Depends(Allowed(settings, write=False))],
        responses=problems(400, 401, 404, 408, 409, 413, 415, 421, 422, 429, 503),
    )
    bodies, parsing = Bodies(settings), asyncio.Lock()

    @routes.post(
        "/v1/predict",
        openapi_extra=_body_of(PredictBody, {"domain": {"type": "string"}}, ["domain"]),
        summary="What one domain sees on images",
        response_model_exclude_none=True,
    )
    async def predict(request: Request) -> answers.DomainPrediction:
        began = time.perf_counter()
        with bodies.room() as take:
            body, images = await read_body(request, settings, PredictBody, take, parsing)
            request.state.note = {"domain": body.domain, "images": len(images)}
            answer = await _while_asked(request, engine.predict(body.domain, images))
        metrics.observe_engine(engine)
        return answers.domain_prediction(answer, body.top_k, 1000 * (time.perf_counter() - began))

    @routes.post(
        "/v1/predict/auto",
        openapi_extra=_body_of(AutoBody, {"domains": _NAMES}, []),
        summary="What the domain that fits best sees on images",
        response_model_exclude_none=True,
    )
    async def predict_auto(request: Request) -> answers.AutoPrediction:
        began = time.perf_counter()
        with bodies.room() as take:
            body, images = await read_body(request, settings, AutoBody, take, parsing)
            request.state.note = {"images": len(images)}
            best = await _while_asked(request, engine.predict_best(body.domains, images))
        metrics.observe_engine(engine)
        return answers.auto_prediction(best, body.top_k, 1000 * (time.perf_counter() - began))

    return routes


async def _while_asked(request: Request, work: Coroutine[Any, Any, R]) -> R:
    """What the work gives, unless the client goes away before: then nobody does it any more."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, left = asyncio.create_task(work), asyncio.create_task(leave())
    try:
        await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise Refusal(_GONE, "the client has gone away")
    finally:
        answer.cancel()
        left.cancel()
        await asyncio.gather(answer, left, return_exceptions=True)


def _body_of(model: type[ImagesBody], fields: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """The OpenAPI of a body that may be a form or JSON."""
    files = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
    properties = {"images": files, "top_k": {"type": "integer", "minimum": 1, "maximum": 1000}} | fields
    form = {"type": "object", "properties": properties, "required": ["images", *required]}
    schemas = {"multipart/form-data": form, "application/json": model.model_json_schema()}
    content = {media_type: {"schema": schema} for media_type, schema in schemas.items()}
    return {"requestBody": {"required": True, "content": content}}


def domains_router(settings: Settings, engine: Engine) -> APIRouter:
    """The addresses of the library."""
    routes = APIRouter(responses=problems(401, 421, 422))
    library, uploads = engine.library, asyncio.Semaphore(_UPLOADS)
    reader = Depends(Allowed(settings, write=False))
    writer = Depends(Allowed(settings, write=True))

    @routes.get("/v1/domains", responses=problems(503), dependencies=[reader], summary="The library, in order of names")
    async def list_domains(
        after: Annotated[str, Query(max_length=100)] = "", limit: Annotated[int, Query(ge=1, le=1000)] = 1000
    ) -> answers.DomainList:
        entries = await engine.aside(library.entries)
        kept = await engine.aside(library.versions)
        rest = [entry for entry in entries if entry.name > after]
        shown = rest[:limit]
        return answers.DomainList(
            base=answers.BaseSummary(name=engine.base.name, fingerprint=engine.base.fingerprint),
            total=len(entries),
            domains=[answers.domain_summary(e, e.key in engine.cache, kept.get(e.name, [])) for e in shown],
            next=shown[-1].name if len(rest) > len(shown) else None,
            rejected=[answers.Rejected(name=name, reason=why) for name, why in library.rejected().items()],
            writable=settings.allow_writes,
        )

    @routes.get("/v1/domains/{name}", responses=problems(404, 409, 503), dependencies=[reader], summary="One domain")
    async def show_domain(name: Name) -> answers.DomainDetail:
        entry, kept = await engine.aside(library.find, name), await engine.aside(library.versions)
        return answers.domain_detail(entry, entry.key in engine.cache, kept.get(name, []))

    @routes.put(
        "/v1/domains/{name}",
        responses=problems(400, 403, 404, 408, 409, 413, 415, 429, 503, 507) | {201: {"model": answers.DomainDetail}},
        dependencies=[writer],
        openapi_extra={"requestBody": {"required": True, "content": _PACK}},
        summary="Upload a pack: checked whole, then visible at once",
    )
    async def put_domain(name: Name, request: Request, response: Response, force: bool = False) -> answers.DomainDetail:
        kind = request.headers.get("content-type", "application/octet-stream").partition(";")[0]
        if kind.strip().lower() != "application/octet-stream":
            raise Refusal(415, "send the pack as application/octet-stream")
        if uploads.locked():
            raise busy("other packs are being uploaded", 2)
        async with uploads:
            upload = await engine.aside(library.new_upload, name)
            try:
                await _receive(request, upload, engine, settings)
                created = await engine.aside(partial(library.adopt, name, upload, force=force))
            finally:
                upload.unlink(missing_ok=True)
        response.status_code = 201 if created else 200
        return await show_domain(name)

    @routes.post(
        "/v1/domains/{name}/rollback",
        responses=problems(403, 404, 409, 503, 507),
        dependencies=[writer],
        summary="Bring back a version of a pack, by default the one before",
    )
    async def rollback_domain(
        name: Name, to: Annotated[int | None, Query(ge=1, le=999_999)] = None
    ) -> answers.DomainDetail:
        await engine.aside(library.rollback, name, to)
        return await show_domain(name)

    @routes.delete(
        "/v1/domains/{name}",
        status_code=204,
        responses=problems(403, 404, 409, 503, 507),
        dependencies=[writer],
        summary="Delete a pack; refused where others draw on its masks, unless `force`",
    )
    async def delete_domain(name: Name, force: bool = False) -> None:
        await engine.aside(partial(library.remove, name, force=force))

    return routes


async def _receive(request: Request, upload: Path, engine: Engine, settings: Settings) -> None:
    """Write a body into a file, a megabyte at a time."""
    held = bytearray()

    def write() -> None:
        try:
            with upload.open("ab") as file:
                file.write(held)
        except OSError as error:
            raise Refusal(507, f"the pack cannot be stored: {error.strerror}") from error
        held.clear()

    async for piece in body_pieces(request, settings.max_pack_bytes, settings.upload_timeout):
        held += piece
        if len(held) >= _PIECE:
            await engine.aside(write)
    if held:
        await engine.aside(write)


def operations_router(settings: Settings, engine: Engine, metrics: answers.Metrics) -> APIRouter:
    """The addresses that tell how the server is."""
    routes = APIRouter(responses=problems(421))

    @routes.get("/healthz", summary="200 while the process works")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/readyz", responses=problems(503), summary="200 while requests are welcome")
    async def readyz() -> dict[str, str]:
        if engine.batcher.closed:
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
        return Response(metrics.text(), media_type=answers.CONTENT_TYPE)

    return routes


def pages_router() -> APIRouter:
    """The page, its style and its script."""
    routes = APIRouter(include_in_schema=False)
    html, style, script = ((PAGES / name).read_text("utf-8") for name in ("index.html", "page.css", "page.js"))
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {variables('dark')} }} }}"
    style = f":root {{ {variables('light')} }}\n{dark}\n{style}"
    pages = {"/": (html, "html"), "/page.css": (style, "css"), "/page.js": (script, "javascript")}

    async def page(request: Request) -> Response:
        text, kind = pages[request.scope["route"].path]
        return Response(text, media_type=f"text/{kind}", headers={"Cache-Control": "no-cache"})

    for address in pages:
        routes.add_api_route(address, page)
    return routes
