"""Who may ask, and how much: tokens, host names, bodies; what every answer carries."""

import asyncio
import hmac
import json
import logging
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from secrets import token_hex
from typing import Annotated, Any

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polymask.serve.settings import Refusal, Settings, busy

LOG = logging.getLogger("polymask.serve")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
}
_LOGGERS = {
    "polymask.serve": logging.INFO,
    "uvicorn.error": logging.WARNING,
    "python_multipart": logging.ERROR,  # a client's mistakes are in its answers
}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

ObserveRequest = Callable[[str, int, float], None]  # route, status, seconds


class Gate:
    """The outermost layer: request ids, host names, headers, one line of log for each request."""

    def __init__(self, app: ASGIApp, settings: Settings, observe: ObserveRequest) -> None:
        self.app, self.settings, self.observe = app, settings, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope)
        known = _REQUEST_ID.fullmatch(given.get("x-request-id", ""))
        request_id = known[0] if known else token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.monotonic(), 0
        # An answer before the end of the body ends the connection, or the rest would come in.
        body_is_read = given.get("content-length", "0") == "0" and "transfer-encoding" not in given

        async def receive_noted() -> Message:
            nonlocal body_is_read
            message = await receive()
            body_is_read = body_is_read or not message.get("more_body", False)
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers["X-Request-ID"] = request_id
                if not body_is_read:
                    headers["Connection"] = "close"
            await send(message)

        refusal = self._refusal(given)
        app = self.app if refusal is None else explain(refusal, request_id)
        try:
            await app(scope, receive_noted, send_with_headers)
        finally:
            seconds = time.monotonic() - began
            self.observe(getattr(scope.get("route"), "path", "other"), status, seconds)
            if self.settings.log_requests:
                line = {"request": request_id, "method": scope["method"], "path": scope["path"][:200]}
                line |= {"status": status, "ms": round(1000 * seconds, 1)}
                LOG.info(json.dumps(line | scope["state"].get("note", {})))

    def _refusal(self, given: Headers) -> Refusal | None:
        """Why a request is refused by its head alone."""
        host, hosts, allowed = given.get("host", "").lower(), self.settings.hosts, self.settings.cors_origins
        # A page of another site may have its own name point here; then the name gives it away.
        if hosts and (host if host.endswith("]") else host.rsplit(":", 1)[0]) not in hosts:
            return Refusal(421, "this server is not known by that host name")
        origin = given.get("origin", "").lower()
        # Browsers send some requests of other sites' pages without asking first, and these cost as much as ours.
        if origin and origin.partition("://")[2] != host and not {origin, "*"} & set(allowed):
            return Refusal(403, "pages of other sites may not use this server; --cors-origin allows them")
        if "content-length" in given and "transfer-encoding" in given:
            return Refusal(400, "send Content-Length or Transfer-Encoding, not both")
        return None


class Allowed:
    """A dependency that lets a request through or refuses it, before its body is read.

    The bearer token is needed to write, and to read where the settings say so.
    """

    def __init__(self, settings: Settings, *, write: bool) -> None:
        self._forbidden = write and not settings.allow_writes
        self._token = settings.token if write or settings.token_for_reads else None

    def __call__(
        self,
        request: Request,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
    ) -> None:
        """Refuse, or return; `credentials` is how the OpenAPI knows of the token."""
        if self._forbidden:
            raise Refusal(403, "this server does not take packs; its operator can allow it with --token-file")
        if self._token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token.encode()):
            message = "this needs the server's token: Authorization: Bearer TOKEN"
            raise Refusal(401, message, headers={"WWW-Authenticate": "Bearer"})


class Bodies:
    """The bytes of all requests that are being read or answered, bounded.

    They count as they come: a client that only says it will send much keeps no room from others.
    """

    def __init__(self, settings: Settings) -> None:
        self._most, self._held = max(settings.max_bodies_bytes, settings.max_body_bytes), 0

    @contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """While one request is read and answered: what to call with the number of bytes that came."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self._held + size > self._most:
                raise busy("too many requests are under way", 1)
            self._held += size
            mine += size

        try:
            yield take
        finally:
            self._held -= mine


def declared_length(request: Request, unknown: int) -> int:
    """Content-Length, or `unknown`."""
    given = request.headers.get("content-length", "")
    return int(given) if given.isdecimal() and len(given) < 19 else unknown


async def body_pieces(request: Request, limit: int, seconds: float) -> AsyncIterator[bytes]:
    """The pieces of a body of at most `limit` bytes, all within `seconds`."""
    too_large = f"the body is too large; send at most {limit:,} bytes"
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refusal(415, "send the body without a Content-Encoding")
    if declared_length(request, 0) > limit:
        raise Refusal(413, too_large)
    pieces, size = request.stream(), 0
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                piece = await anext(pieces)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise Refusal(408, f"the body did not come within {seconds:g} s") from error
        except ClientDisconnect as error:
            raise Refusal(400, "the request ended before its body did") from error
        size += len(piece)
        if size > limit:
            raise Refusal(413, too_large)
        if piece:
            yield piece


def explain(refusal: Refusal, request_id: str) -> JSONResponse:
    """A refusal as an answer."""
    message = str(refusal).encode("utf-8", "replace").decode()[:1000]
    return JSONResponse({"error": message, "request": request_id}, refusal.status, refusal.headers)


def log_to_stderr() -> None:
    """One JSON object a line; never anything of an image."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLine())
    for name, level in _LOGGERS.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class _JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {"time": f"{when}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        text = record.getMessage()
        line |= json.loads(text) if text.startswith("{") else {"message": text}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)
