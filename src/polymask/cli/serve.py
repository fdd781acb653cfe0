"""The verb that serves a library over HTTP."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from polymask.cli.verb import BaseVerb

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.serve.settings import Settings


@dataclass(kw_only=True)
class Serve(BaseVerb):
    """Serve a library over HTTP: predictions, uploads, a web page."""

    library: tyro.conf.Positional[Path]
    """A folder of packs; one that appears in it is served at once."""
    base: str | None = None
    """The base, where it is not the one that the first pack names."""
    host: str = "127.0.0.1"
    """The address to listen on. Beyond this machine, writing needs --token-file."""
    port: int = 8000
    """The port; 0 takes a free one."""
    cache_bytes: int = 1 << 30
    """Bytes of merged networks that each worker keeps warm."""
    workers: int = 1
    """Processes; they share the base's memory."""
    runners: int = 2
    """Threads of each worker that run networks."""
    threads: int | None = None
    """Threads of torch for each runner; the cores shared out where none is given."""
    window_ms: float = 2.0
    """How long a request waits for others to be run with."""
    max_batch: int = 32
    """Images that are run together at most."""
    max_queue: int = 512
    """Images that a worker admits before it answers 429."""
    max_body_bytes: int = 32 << 20
    """The largest request."""
    max_pack_bytes: int = 512 << 20
    """The largest upload."""
    max_pixels: int = 25_000_000
    """The largest image."""
    auto_domains: int = 64
    """Domains that /v1/predict/auto compares at most."""
    timeout: float = 30.0
    """Seconds after which a request is given up."""
    drain: int = 30
    """Seconds that requests under way have when the server is told to stop."""
    token_file: Path | None = None
    """A file with the token that uploads and deletions must carry."""
    token_for_reads: bool = False
    """Ask for the token in every request."""
    allow_host: list[str] | None = None
    """Names that requests may call the server by, without a port."""
    cors_origin: list[str] | None = None
    """Origins whose pages may use the server from a browser; none is the default."""
    no_request_log: bool = False
    """Do not log each request."""

    def run(self) -> dict[str, Any]:
        try:
            from polymask.serve.process import serve
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'polymask[serve]'") from error
        began = time.monotonic()
        address: list[str] = []

        def ready(url: str) -> None:
            address.append(url)
            self.say(f"serving {self.library} at {url}")
            sys.stderr.flush()

        serve(
            self.settings(),
            host=self.host,
            port=self.port,
            workers=self.workers,
            drain=self.drain,
            ready=ready,
        )
        return {"address": address[0], "seconds": round(time.monotonic() - began, 1)}

    def settings(self) -> "Settings":
        """What the server is told."""
        from polymask.serve.process import is_loopback, loopback_names
        from polymask.serve.settings import Settings, read_token

        local = is_loopback(self.host)
        token = None if self.token_file is None else read_token(self.token_file)
        hosts = tuple(name.lower() for name in self.allow_host or ())
        return Settings(
            library=self.library,
            base=self.base,
            weights=self.weights,
            device=self.device,
            cache_bytes=self.cache_bytes,
            runners=self.runners,
            threads=self.threads,
            window=self.window_ms / 1000,
            max_batch=self.max_batch,
            max_queue=self.max_queue,
            max_body_bytes=self.max_body_bytes,
            max_pack_bytes=self.max_pack_bytes,
            max_pixels=self.max_pixels,
            auto_domains=self.auto_domains,
            timeout=self.timeout,
            token=token,
            token_for_reads=self.token_for_reads,
            allow_writes=local or token is not None,
            hosts=hosts + (loopback_names(self.host) if local or hosts else ()),
            cors_origins=tuple(self.cors_origin or ()),
            log_requests=not self.no_request_log,
        )

    def present(self, result: dict[str, Any], console: "Console") -> None:
        console.print(f"stopped after {result['seconds']} s")
