"""How a server is set up: what it serves, its limits and times; and how a request is refused."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from polymask.errors import PolymaskError


class ServeError(PolymaskError):
    """A server cannot be set up as it was told."""


class Refusal(PolymaskError):  # noqa: N818 - not a fault
    """A request that is not answered; `status` is HTTP's, the message is for the client."""

    def __init__(self, status: int, message: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})


def no_domain(name: str) -> Refusal:
    """Nothing of this name is in the library."""
    return Refusal(404, f"no domain is named {name[:100]!r}; GET /v1/domains lists them")


def busy(message: str, seconds: float) -> Refusal:
    """Too much is under way; the client may come back."""
    wait = max(1, min(60, round(seconds)))
    return Refusal(429, f"{message}; try again in {wait} s", headers={"Retry-After": str(wait)})


_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a server is told; plain values, because they travel to worker processes."""

    library: Path
    base: str | None = None  # the first pack's, where none is named
    weights: Path | None = None
    device: str = "cpu"

    cache_bytes: int = 1024 * _MIB  # of merged networks, in each process
    runners: int = 2  # threads that run networks: one may merge while another answers
    threads: int | None = None  # of torch, for each runner; the cores shared out where None

    window: float = 0.002  # seconds that a request waits for company
    max_batch: int = 32
    max_queue: int = 512  # images admitted and not yet answered
    timeout: float = 30.0  # seconds from a request's last byte to its answer
    read_timeout: float = 20.0  # seconds from a request's first byte to its last
    upload_timeout: float = 300.0  # the same, for a pack

    max_body_bytes: int = 32 * _MIB
    max_bodies_bytes: int = 256 * _MIB  # of all requests that are being read or answered
    max_images: int = 32  # in a request
    max_pixels: int = 25_000_000  # of an image
    max_pack_bytes: int = 512 * _MIB
    max_side: int = 1024  # of what a pack may ask its images to be resized to
    auto_domains: int = 64  # that one image is compared with

    token: str | None = None
    token_for_reads: bool = False
    allow_writes: bool = True
    hosts: tuple[str, ...] = ()  # names that a request may call the server by; any where empty
    cors_origins: tuple[str, ...] = ()
    log_requests: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                given = field.name.replace("_", "-")
                if field.name in ("window", "cache_bytes") and value == 0:
                    continue
                raise ServeError(f"{given} is {value}; it must be positive")
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
