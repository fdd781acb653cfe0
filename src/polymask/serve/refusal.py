"""Why a request is not answered, as a status and a sentence for its sender."""

from collections.abc import Mapping

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
