"""POST /v1/predict and /v1/predict/auto."""

import time
from typing import Any

from fastapi import APIRouter, Depends, Request

from polymask.serve import answers
from polymask.serve.asking import AutoBody, PredictBody, read_asked
from polymask.serve.engine import Engine
from polymask.serve.metrics import Metrics
from polymask.serve.routes import problems
from polymask.serve.security import Allowed, Bodies
from polymask.serve.settings import Settings

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
