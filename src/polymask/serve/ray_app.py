"""A library on several hosts: a Ray Serve app that sends a domain to where it is warm.

    serve run polymask.serve.ray_app:build library=/shared/library base=efficientnet-lite0

One door takes the requests: the same addresses, limits and page as `polymask serve`. Behind it
replicas hold the base and the networks that were merged last. Ray's model multiplexing knows which
replica has which domain, and prefers it; a domain that is asked for often gets warm on more of
them. The library is a folder that all hosts see.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from polymask.core.base import Base
from polymask.serve.app import create_app, open_base
from polymask.serve.engine import Answer, Engine
from polymask.serve.library import Entry
from polymask.serve.settings import Refusal, ServeError, Settings, read_token

_OWN = ("replicas", "warm_domains", "cpus", "gpus", "token_file")
_NUMBERS = {"int": int, "float": float, "int | None": int}


@dataclass(frozen=True)
class Refused:
    """A refusal on its way through Ray, which would wrap an exception in its own."""

    status: int
    message: str
    headers: dict[str, str]


def build(arguments: Mapping[str, str]) -> Any:
    """The Ray Serve application; `arguments` are those of `serve run`.

    They are the fields of `Settings`, and: `replicas` (2), `warm_domains` that Ray counts on in
    each of them (50), `cpus` (1) and `gpus` (0) of each, and `token_file`. Without a token nobody
    can write.
    """
    serve = _ray_serve()
    settings = settings_of(arguments)
    count, warm = int(arguments.get("replicas", 2)), int(arguments.get("warm_domains", 50))
    cpus, gpus = float(arguments.get("cpus", 1)), float(arguments.get("gpus", 0))
    resources = {"num_cpus": cpus, "num_gpus": gpus}
    replicas = serve.deployment(
        replica_class(serve, warm),
        name="replica",
        num_replicas=count,
        max_ongoing_requests=settings.max_queue,
        ray_actor_options=resources,
    ).bind(settings)
    door = serve.deployment(Door, name="door", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 1})
    return door.bind(settings, replicas)


def settings_of(arguments: Mapping[str, str]) -> Settings:
    """The settings that words of a command stand for."""
    kinds = {field.name: field.type for field in fields(Settings)}
    unknown = sorted(set(arguments) - set(kinds) - set(_OWN))
    if unknown:
        raise ServeError(f"{', '.join(unknown)} is not known; see `polymask serve --help`")
    if "library" not in arguments:
        raise ServeError("library=FOLDER is missing; give one that all hosts see")
    found: dict[str, Any] = {"allow_writes": False, "library": Path(arguments["library"])}
    for name, value in arguments.items():
        kind = str(getattr(kinds.get(name), "__name__", kinds.get(name)))
        if kind in _NUMBERS:
            found[name] = _NUMBERS[kind](value)
        elif name in ("base", "device"):
            found[name] = value
        elif name == "weights":
            found[name] = Path(value)
    if "token_file" in arguments:
        found |= {"token": read_token(Path(arguments["token_file"])), "allow_writes": True}
        found["token_for_reads"] = arguments.get("token_for_reads", "").lower() == "true"
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

        async def predict(self, name: str, images: Sequence[bytes]) -> Answer | Refused:
            """What a domain says of image files."""
            try:
                answer = await self.engine.predict(name, images)
            except Refusal as refusal:
                return Refused(refusal.status, str(refusal), refusal.headers)
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

    def __init__(
        self,
        replicas: Any,
        settings: Settings,
        base: Base,
        observe: Callable[[int, float], None] = lambda images, seconds: None,
    ) -> None:
        super().__init__(settings, base, observe)
        self._replicas = replicas

    async def _predict(self, name: str, images: Sequence[bytes]) -> Answer:
        await self.aside(self.library.find, name)  # so that no replica hears of names that are none
        handle = self._replicas.options(multiplexed_model_id=name)
        reply: Answer | Refused = await handle.predict.remote(name, list(images))
        if isinstance(reply, Refused):
            raise Refusal(reply.status, reply.message, headers=reply.headers)
        return reply

    async def _ask_all(self, entries: list[Entry], images: Sequence[bytes]) -> list[Answer]:
        asked = (self._predict(entry.name, images) for entry in entries)
        answers = []
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, Answer):
                answers.append(answer)
            elif not isinstance(answer, Refusal):
                raise answer
        return answers


def _ray_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise ServeError(f"{error}; pip install 'polymask[serve]' 'ray[serve]'") from error
    return serve
