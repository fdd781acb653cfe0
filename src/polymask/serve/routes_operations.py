"""GET /healthz, /readyz and /metrics, for those who run the server."""

import os

from fastapi import APIRouter, Depends, Response
from fastapi.responses import PlainTextResponse

from polymask.serve.engine import Engine
from polymask.serve.metrics import CONTENT_TYPE, Metrics
from polymask.serve.refusal import Refusal
from polymask.serve.routes import problems
from polymask.serve.security import Allowed
from polymask.serve.settings import Settings


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
