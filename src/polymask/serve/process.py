"""Worker processes, their signals, and what they share. Imports no torch: workers start with it.

The base is a file that each worker maps into its memory: the system keeps a mapped file's pages
once, however many processes read them. Merged networks are each process' own; what a domain leaves
as it is stays shared.

SIGTERM and Ctrl-C stop a server gently: no new connections, requests under way are answered, at
most for `drain` seconds. A worker that dies is replaced; workers whose parent dies stop.
"""

import asyncio
import ipaddress
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.supervisors import Multiprocess

from polymask.serve.settings import ServeError, Settings

if TYPE_CHECKING:
    from fastapi import FastAPI
    from torch import Tensor

    from polymask.core.base import Base
    from polymask.serve.library import Library

HEAD_SECONDS = 10.0
WRITE_SECONDS = 20.0
_HEALTH_SECONDS = 60  # a worker that is silent for so long is replaced; a dead one at once
_CONNECTIONS = 1000  # of a worker
_LAST_SECONDS = 3.0  # for threads to finish once no request is left, or the drain is over


class ImpatientProtocol(H11Protocol):
    """Closes a connection whose next request does not begin, or whose head does not end, in time.

    Uvicorn bounds the time between requests, and the app the time of a body; this is the rest.
    """

    head_timer: asyncio.TimerHandle | None = None
    write_timer: asyncio.TimerHandle | None = None

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
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait for a client that does not read its answer, but not for ever."""
        super().pause_writing()
        self.write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on with an answer that is read again."""
        super().resume_writing()
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None

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


Ready = Callable[[str, str, Mapping[str, str]], None]  # the address, the device, why packs are not served


def serve(settings: Settings, *, host: str, port: int, workers: int, drain: int, ready: Ready) -> None:
    """Serve until SIGTERM or Ctrl-C; `ready` is called before the first request."""
    with _listen(host, port) as listening, tempfile.TemporaryDirectory(prefix="polymask-serve-") as folder:
        configure = partial(
            uvicorn.Config,
            factory=True,
            host=host,
            http="polymask.serve.process:ImpatientProtocol",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            workers=workers,
            limit_concurrency=_CONNECTIONS,
            timeout_graceful_shutdown=drain,
            timeout_worker_healthcheck=_HEALTH_SECONDS,
        )
        signal.signal(signal.SIGTERM, _leave)  # until there is a server that can end in order
        url = f"http://{_bracketed(host)}:{listening.getsockname()[1]}"
        if workers == 1:
            app = worker_app(settings)
            server = uvicorn.Server(configure(lambda: app))
            # uvicorn listens to it a moment after it is announced, and sends it on at the end.
            signal.signal(signal.SIGTERM, lambda number, frame: setattr(server, "should_exit", True))
            _announce(ready, url, app.state.engine.library)
            server.run([listening])
            return
        from polymask.serve.app import open_base
        from polymask.serve.library import Library

        base = open_base(settings)
        library = Library(settings.library, base, max_side=settings.max_side, forget=lambda key: None)
        shared = _write_base(base, Path(folder) / "base.safetensors")
        metrics = Path(folder) / "metrics"
        metrics.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
        supervisor = _Supervisor(
            configure(partial(worker_app, settings, shared=shared, parent=os.getpid())), [listening]
        )
        _announce(ready, url, library)  # from here on it hears signals
        del base, library  # workers have their own
        try:
            supervisor.run()
        finally:
            del os.environ["PROMETHEUS_MULTIPROC_DIR"]


def _leave(number: int, frame: object) -> None:
    """End at once: nothing is under way yet."""
    raise SystemExit(0)


def _announce(ready: Ready, url: str, library: "Library") -> None:
    library.entries()  # a look at the folder, so that it knows what it rejects
    ready(url, str(library.base.device), library.rejected())


def worker_app(settings: Settings, *, shared: Path | None = None, parent: int | None = None) -> "FastAPI":
    """The app of one worker; `shared` is the base's file, `parent` the process it must not outlive."""
    import torch

    from polymask.methods.affine.formula import VARIABLE, set_kernels
    from polymask.serve.app import create_app, open_base
    from polymask.serve.security import log_to_stderr

    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    log_to_stderr()
    torch.set_num_threads(settings.threads_each)
    base = open_base(settings)
    if shared is not None:
        _map_base(base, shared)
    set_kernels(settings.kernels or os.environ.get(VARIABLE) or "auto")
    return create_app(settings, base, closing=_end_soon)


def _write_base(base: "Base", path: Path) -> Path | None:
    """Write every tensor of the base to a safetensors file; None where workers have it on another device."""
    from polymask.nets.base_file import write_aligned

    if base.device.type != "cpu":
        return None
    write_aligned(path, dict(_tensors(base)), {})
    return path


def _map_base(base: "Base", path: Path) -> None:
    """Put the tensors that `_write_base` wrote in place of a base's own, without a copy; the same to the byte."""
    from safetensors.torch import load_file

    mapped = load_file(path)
    for name, tensor in _tensors(base):
        tensor.data = mapped[name]
    base.verify()


def _tensors(base: "Base") -> "list[tuple[str, Tensor]]":
    from polymask.core.network import named_tensors

    found = [(f"net/{name}", tensor) for name, tensor in named_tensors(base.net)]
    own_head = [] if base.head is None else named_tensors(base.head)
    return found + [(f"head/{name}", tensor) for name, tensor in own_head]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def loopback_names(host: str) -> tuple[str, ...]:
    """What a browser on this machine may call a server that listens on loopback."""
    return ("localhost", "127.0.0.1", "[::1]", _bracketed(host).lower())


class _Supervisor(Multiprocess):
    def init_processes(self) -> None:
        super().init_processes()
        self._leave_ends_to_workers()

    def _leave_ends_to_workers(self) -> None:
        """Close this process's copies of the workers' ends of pipes: else nobody hears of the end of a worker."""
        for process in self.processes:
            process.child_conn.close()

    def keep_subprocess_alive(self) -> None:
        from prometheus_client.multiprocess import mark_process_dead

        before = {process.pid for process in self.processes}
        super().keep_subprocess_alive()
        self._leave_ends_to_workers()
        for pid in before - {process.pid for process in self.processes}:
            mark_process_dead(pid)  # type: ignore[no-untyped-call]


def _end_soon() -> None:
    """End this process in a moment, whatever its threads are at: nothing of theirs is for a file."""
    last = threading.Timer(_LAST_SECONDS, os._exit, (0,))
    last.daemon = True
    last.start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def _listen(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        reason: Any = getattr(error, "strerror", None) or error
        raise ServeError(f"cannot listen on {host}, port {port}: {reason}") from error
    listening.set_inheritable(True)
    return listening


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
