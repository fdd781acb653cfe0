"""The HTTP app: the parts of a server put together. See docs/serve.md."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polymask.core.base import Base
from polymask.core.network import named_tensors
from polymask.serve.settings import ServeError, Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from polymask import __version__
from polymask.errors import PackError
from polymask.nets.base_file import write_aligned
from polymask.nets.zoo import load_base
from polymask.pack.format import inspect, packs_in
from polymask.serve import routes
from polymask.serve.engine import Engine
from polymask.serve.responses import Metrics
from polymask.serve.security import Gate, explain
from polymask.serve.settings import Refusal

EngineOf = Callable[[Settings, Base, Callable[[int, float], None]], Engine]


class ServeApp(FastAPI):
    """The app behind its gate, which sees every request and every answer."""

    gate: Callable[[ASGIApp], ASGIApp]

    def build_middleware_stack(self) -> ASGIApp:
        """All layers, the gate outermost."""
        return self.gate(super().build_middleware_stack())


def open_base(settings: Settings) -> Base:
    """The base that is named, or the one of the library's first pack that can be read."""
    name = settings.base or _base_of(settings.library)
    return load_base(name, weights=settings.weights, device=settings.device)


def _base_of(library: Path) -> str:
    for path in packs_in(library):
        with suppress(PackError):
            return inspect(path).manifest.base
    raise ServeError(f"{library} has no pack that could say which base to load; give --base")


def create_app(settings: Settings, base: Base | None = None, engine_of: EngineOf = Engine) -> FastAPI:
    """The ASGI app of a library; loads the base where none is given.

    `engine_of` makes what answers: the networks are run here, unless it says otherwise.
    """
    metrics = Metrics()
    engine = engine_of(settings, base or open_base(settings), metrics.observe_batch)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    app = ServeApp(
        title="polymask",
        version=__version__,
        description="One resident base, many domains. Images in, classes out.",
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
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
    app.include_router(routes.predictions_router(settings, engine, metrics))
    app.include_router(routes.domains_router(settings, engine))
    app.include_router(routes.operations_router(settings, engine, metrics))
    app.include_router(routes.pages_router())
    return app


def _explain_errors(app: FastAPI) -> None:
    def answer(request: Request, refusal: Refusal) -> JSONResponse:
        return explain(refusal, request.state.request_id)

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> JSONResponse:
        return answer(request, error)

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: HTTPException) -> JSONResponse:
        refusal = Refusal(error.status_code, str(error.detail), headers=error.headers)
        return answer(request, refusal)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return answer(request, Refusal(422, f"{place}: {first['msg']}"))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return answer(request, Refusal(500, "the server made a mistake; its log has more"))


def write_shared_base(base: Base, path: Path) -> None:
    """Write every tensor of a base to a safetensors file."""
    write_aligned(path, dict(_tensors(base)), {})


def map_shared_base(base: Base, path: Path) -> None:
    """Put the tensors of a file that `write_shared_base` wrote in place of a base's own, without a copy.

    They are checked to be the same to the byte.
    """
    from safetensors.torch import load_file

    mapped = load_file(path)
    with torch.no_grad():
        for name, tensor in _tensors(base):
            tensor.data = mapped[name]
    base.verify()


def _tensors(base: Base) -> list[tuple[str, Tensor]]:
    found = [(f"net/{name}", tensor) for name, tensor in named_tensors(base.net)]
    if base.head is not None:
        found += [(f"head/{name}", tensor) for name, tensor in named_tensors(base.head)]
    return found
