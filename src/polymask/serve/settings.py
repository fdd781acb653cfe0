"""How a server is set up: what it serves, its limits and times; and how a request is refused."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from polymask.errors import PolymaskError

_MIB = 1 << 20


class ServeError(PolymaskError):
    """A server cannot be set up as it was told."""


class Refusal(PolymaskError):  # noqa: N818 - not a fault
    """A request that is not answered: HTTP's status, a message for the client, seconds until it may retry."""

    def __init__(
        self, status: int, message: str, *, retry: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        if retry is not None:
            self.headers["Retry-After"] = str(retry)


def no_domain(name: str) -> Refusal:
    """Nothing of this name is in the library."""
    return Refusal(404, f"no domain is named {name[:100]!r}; GET /v1/domains lists them")


def busy(message: str, seconds: float) -> Refusal:
    """Too much is under way; the client may come back."""
    wait = max(1, min(60, round(seconds)))
    return Refusal(429, f"{message}; try again in {wait} s", retry=wait)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a server takes, and how long it waits."""

    cache_bytes: int = 1024 * _MIB
    """Bytes of merged networks that each worker keeps warm."""
    runners: int = 2
    """Threads of each worker that run networks: one may merge while another answers."""
    threads: int | None = None
    """Threads of torch for each runner; by default the cores are shared out."""
    max_batch: int = 32
    """Images that are run together at most."""
    max_queue: int = 512
    """Images that a worker admits before it answers 429."""
    timeout: float = 30.0
    """Seconds from a request's last byte to its answer, after which it is given up."""
    read_timeout: float = 20.0
    """Seconds from a request's first byte to its last."""
    upload_timeout: float = 300.0
    """The same, for a pack."""
    max_body_bytes: int = 32 * _MIB
    """The largest request."""
    max_bodies_bytes: int = 256 * _MIB
    """Bytes of all requests that are being read or answered."""
    max_images: int = 32
    """Images in a request."""
    max_pixels: int = 25_000_000
    """The largest image."""
    decoders: int = 8
    """Processes of each worker that decode images, started when they are needed; a quarter as many for costly ones."""
    decode_seconds: float = 2.0
    """Seconds of a core that decoding an image may take."""
    decode_bytes: int = 160 * _MIB
    """Bytes of memory that decoding an image may take."""
    max_pack_bytes: int = 512 * _MIB
    """The largest upload."""
    max_side: int = 640
    """Pixels that a pack may ask its images to be resized to."""
    auto_domains: int = 64
    """Domains that /v1/predict/auto compares at most by running each."""
    token_for_reads: bool = False
    """Ask for the token in every request."""


@dataclass(frozen=True, kw_only=True)
class Settings(Limits):
    """All that a server is told; plain values, because they travel to worker processes."""

    library: Path
    base: str | None = None  # by default the first pack's
    weights: Path | None = None
    device: str = "auto"
    kernels: str | None = None  # by default what POLYMASK_KERNELS says, or auto
    window: float = 0.002  # seconds that a request waits for others to be run with
    token: str | None = None
    allow_writes: bool = True
    hosts: tuple[str, ...] = ()  # names that a request may call the server by; any where empty
    cors_origins: tuple[str, ...] = ()
    log_requests: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            may_be_zero = field.name in ("window", "cache_bytes")
            if value < 0 or (value == 0 and not may_be_zero):
                raise ServeError(f"{field.name.replace('_', '-')} is {value}; it must be positive")
        if self.token_for_reads and self.token is None:
            raise ServeError("reads need a token, but there is none; give --token-file")

    @property
    def threads_each(self) -> int:
        """Threads of torch for each runner."""
        return self.threads or max(1, (os.cpu_count() or 1) // self.runners)


def read_token(path: Path) -> str:
    """The token in a file: one line of 16 to 512 visible ASCII characters."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ServeError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ServeError(f"the token in {path} is not ASCII") from error
    if not 16 <= len(token) <= 512 or not token.isprintable() or " " in token:
        raise ServeError(
            f"{path} must hold one token of 16 to 512 visible characters; write one with: openssl rand -hex 32"
        )
    return token
