"""HTTP/1.1 as uvicorn speaks it, to clients that take their time with a request's head too."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0


class ImpatientProtocol(H11Protocol):
    """Closes a connection whose next request does not begin, or whose head does not end, in time.

    Uvicorn bounds the time between requests, and the app the time of a body; this is the rest.
    """

    head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.head_timer is None and not self._answering():
            self._await_head()
        super().data_received(data)
        if self._answering():
            self._head_is_here()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self.head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _head_is_here(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _give_up(self) -> None:
        self.head_timer = None
        if not self._answering() and not self.transport.is_closing():
            self.transport.close()
