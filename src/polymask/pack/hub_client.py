"""huggingface_hub, imported when it is needed, and its errors in our words."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from polymask._version import __version__
from polymask.errors import HubError, PolymaskError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def open_hub(token: str | None = None) -> "HfApi":
    """The Hub's client; `token` is the saved one where none is given."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise HubError(f"the Hub needs huggingface_hub ({error}); pip install 'polymask[hub]'") from error
    return HfApi(token=token, library_name="polymask", library_version=__version__)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turns the errors of huggingface_hub about `name` into ones that say what to do."""
    from huggingface_hub import errors

    try:
        yield
    except PolymaskError:
        raise
    except errors.GatedRepoError as error:
        raise HubError(f"{name} is gated: ask for access on its page, then {LOG_IN}") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{name} is not on the Hub, or is private and your token does not open it; check the name, or {LOG_IN}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{name}: the repository has no such revision; name a branch, a tag or a commit of it"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise HubError(f"{name}: the repository has no such file; check its name") from error
    except errors.LocalTokenNotFoundError as error:
        raise HubError(f"{name} needs a token; {LOG_IN}") from error
    except errors.HfHubHTTPError as error:
        raise HubError(_refusal(name, error)) from error
    except out_of_reach() as error:
        raise HubError(
            f"{name}: the Hub cannot be reached, and the file is not in the local cache; go "
            "online (and unset HF_HUB_OFFLINE), or give the path of a copy"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        # A full disk, a name or metadata that the Hub refuses, an upload that broke off.
        why = " ".join(f"{error} {error.__cause__ or ''}".split())
        raise HubError(f"{name}: {why}") from error


def out_of_reach() -> tuple[type[Exception], ...]:
    """What is raised where the Hub has given no answer, and the cache has none."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # The library that carries the requests has changed, and is not ours to name.
    failed: Any = HfHubHTTPError.__bases__[0]
    return failed, ConnectionError, TimeoutError, LocalEntryNotFoundError


def _refusal(name: str, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return f"{name}: the Hub wants a valid token; {LOG_IN}"
    if status == 403:
        return f"{name}: your token may not do this; use one with the right to write, of a member of the organisation"
    return f"{name}: the Hub answered {status or 'with an error'}; try again later"
