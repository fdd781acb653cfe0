"""A library on several hosts: a Ray Serve app that sends a domain to where it is warm.

    serve run polymask.serve.ray_app:build library=/shared/library base=efficientnet-lite0

One door takes the requests: the same addresses, limits and page as `polymask serve`. Behind it
replicas hold the base and the networks that were merged last. Ray's model multiplexing knows which
replica has which domain, and prefers it; a domain that is used often gets warm on more of them.
The library is a folder that all hosts see.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from polymask.core.base import Base
from polymask.serve.app import create_app, open_base
from polymask.serve.batcher import Observe
from polymask.serve.engine import Answer, Engine, raise_unless_gone
from polymask.serve.library import Entry
from polymask.serve.settings import Refusal, ServeError, Settings, read_token

_OWN = ("replicas", "warm_domains", "cpus", "gpus", "token_file")


# A refusal on its way through Ray, which would wrap an exception in its own: status, message, headers.
Refused = tuple[int, str, dict[str, str]]


def build(arguments: Mapping[str, str]) -> Any:
    """The Ray Serve application; `arguments` are those of `serve run`.

    They are the fields of `Settings`, and: `replicas` (2), `warm_domains` that Ray counts on in
    each of them (50), `cpus` (1) and `gpus` (0) of each, and `token_file`. Without a token nobody
    can write.
    """
    try:
        serve: Any = import_module("ray.serve")
    except ImportError as error:
        raise ServeError(f"{error}; pip install 'polymask[serve]' 'ray[serve]'") from error
    settings = settings_of(arguments)
    resources = {"num_cpus": float(arguments.get("cpus", 1)), "num_gpus": float(arguments.get("gpus", 0))}
    replicas = serve.deployment(
        replica_class(serve, int(arguments.get("warm_domains", 50))),
        name="replica",
        num_replicas=int(arguments.get("replicas", 2)),
        max_ongoing_requests=settings.max_queue,
        ray_actor_options=resources,
    ).bind(settings)
    door = serve.deployment(Door, name="door", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 1})
    return door.bind(settings, replicas)


def settings_of(arguments: Mapping[str, str]) -> Settings:
    """The settings that words of a command stand for."""
    known: dict[str, Any] = {field.name: field.type for field in fields(Settings)}
    del known["token"], known["allow_writes"]  # they follow from token_file
    unknown = sorted(set(arguments) - set(known) - set(_OWN))
    if unknown:
        raise ServeError(f"{', '.join(unknown)} is not known; see `polymask serve --help`")
    if "library" not in arguments:
        raise ServeError("library=FOLDER is missing; give one that all hosts see")
    token = read_token(Path(arguments["token_file"])) if "token_file" in arguments else None
    found: dict[str, Any] = {"token": token, "allow_writes": token is not None}
    for name in known.keys() & arguments.keys():
        several = name in ("hosts", "cors_origins")
        try:
            value: Any = arguments[name].split(",") if several else arguments[name]
            found[name] = TypeAdapter(known[name]).validate_python(value)
        except ValidationError as error:
            raise ServeError(f"{name}={arguments[name]}: {error.errors()[0]['msg']}") from error
    return Settings(**found)


def replica_class(serve: Any, warm_domains: int) -> type:
    """A replica whose warm domains Ray knows, up to `warm_domains` of them."""

    class Replica:
        """One base with the networks that were merged last."""

        def __init__(self, settings: Settings) -> None:
            torch.set_num_threads(settings.threads_each)
            self.engine = Engine(settings, open_base(settings))

        @serve.multiplexed(max_num_models_per_replica=warm_domains)  # type: ignore[untyped-decorator]
        async def _note(self, name: str) -> str:
            """Let Ray know that this domain is warm here."""
            return name

        async def predict(self, name: str, images: Sequence[bytes | bytearray]) -> Answer | Refused:
            try:
                answer = await self.engine.predict(name, images)
            except Refusal as refusal:
                return refusal.status, str(refusal), refusal.headers
            await self._note(name)
            return answer

    return Replica


class Door:
    """The HTTP app in front of the replicas."""

    def __init__(self, settings: Settings, replicas: Any) -> None:
        self.app = create_app(settings, engine_of=partial(RoutedEngine, replicas))

    async def __call__(self, request: Request) -> Response:
        """Pass a request to the app, and its answer back."""
        started: list[Message] = []
        body = bytearray()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.append(message)
            else:
                body.extend(message.get("body", b""))

        await self.app(request.scope, request.receive, send)
        response = Response(bytes(body), started[0]["status"])
        response.raw_headers = list(started[0]["headers"])
        return response


class RoutedEngine(Engine):
    """An engine whose domains run elsewhere; the library and the base's features are here."""

    def __init__(self, replicas: Any, settings: Settings, base: Base, observe: Observe) -> None:
        super().__init__(settings, base, observe)
        self._replicas = replicas

    async def _predict(self, name: str, images: Sequence[bytes | bytearray]) -> Answer:
        await self.aside(self.library.find, name)  # replicas hear only of names that are known
        handle = self._replicas.options(multiplexed_model_id=name)
        reply: Answer | Refused = await handle.predict.remote(name, list(images))
        if isinstance(reply, Answer):
            return reply
        status, message, headers = reply
        raise Refusal(status, message, headers=headers)

    async def _predict_all(self, entries: list[Entry], images: Sequence[bytes | bytearray]) -> list[Answer]:
        work = (self._predict(entry.name, images) for entry in entries)
        answers = []
        for answer in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(answer, Answer):
                answers.append(answer)
            else:
                raise_unless_gone(answer)
        return answers
