"""Packs on the Hugging Face Hub: how they are named, and the way from there to a file. Imports nothing heavy."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, unquote

from polymask import __version__
from polymask.errors import HubError, PolymaskError
from polymask.files import SUFFIX
from polymask.pack.format import inspect

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PREFIX = "hf:"
_FORM = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?")


@dataclass(frozen=True)
class HubName:
    """A pack on the Hub: its repository, and if they matter the revision and the file."""

    repo: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a name; a slash in a revision is written %2F."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise HubError(
                f"{text} names no pack on the Hub; write hf:USER/REPO, hf:USER/REPO@REVISION "
                "or hf:USER/REPO/FILE.safetensors"
            )
        repo, revision, file = match.groups()
        return cls(repo, unquote(revision) if revision else None, file)

    def __str__(self) -> str:
        revision = f"@{quote(self.revision, safe='')}" if self.revision else ""
        return f"{PREFIX}{self.repo}{revision}" + (f"/{self.file}" if self.file else "")


def is_hub_name(path: str | Path) -> bool:
    """Whether this names a pack on the Hub, not a file."""
    return str(path).startswith(PREFIX)


def local_pack(path: str | Path) -> Path:
    """The file of a pack: the path itself, or where a pack of the Hub was downloaded to."""
    if not is_hub_name(path):
        return Path(path)
    text = path.as_posix() if isinstance(path, Path) else path
    return fetch(HubName.parse(text))


LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_REFUSALS: dict[Any, str] = {
    401: f"the Hub wants a valid token; {LOG_IN}",
    403: "your token may not do this; use one with the right to write, of a member of the organisation",
}


def open_hub(token: str | None = None) -> "HfApi":
    """The Hub's client; `token` is the saved one where none is given."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise HubError(f"the Hub needs huggingface_hub ({error}); pip install 'polymask[hub]'") from error
    return HfApi(token=token, library_name="polymask", library_version=__version__)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn the errors of huggingface_hub about `name` into ones that say what to do."""
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
        raise HubError(f"{name}: the repository has no such revision; name a branch, a tag or a commit") from error
    except errors.RemoteEntryNotFoundError as error:
        raise HubError(f"{name}: the repository has no such file; check its name") from error
    except errors.LocalTokenNotFoundError as error:
        raise HubError(f"{name} needs a token; {LOG_IN}") from error
    except errors.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        said = f"the Hub answered {status or 'with an error'}; try again later"
        raise HubError(f"{name}: {_REFUSALS.get(status, said)}") from error
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


def fetch(name: HubName) -> Path:
    """Download a pack, unless it is in the cache; without a file's name, the only one there is.

    What it shares with others comes along. Offline, what was downloaded before is used.
    """
    hub = open_hub()
    with explained(str(name)):
        file = name.file or _only_pack(hub, name)
        pack = Path(hub.hf_hub_download(name.repo, file, revision=name.revision))
        if (beside := inspect(pack).manifest.beside) is not None:
            folder = file.rpartition("/")[0]
            hub.hf_hub_download(name.repo, f"{folder}/{beside}".lstrip("/"), revision=name.revision)
        return pack


def _only_pack(hub: "HfApi", name: HubName) -> str:
    packs = sorted(file for file in _files(hub, name) if file.endswith(SUFFIX))
    if not packs:
        raise HubError(f"{name} holds no pack: the repository has no {SUFFIX} file")
    if len(packs) > 1:
        named = HubName(name.repo, name.revision, packs[0])
        some = ", ".join(packs[:5]) + (" …" if len(packs) > 5 else "")
        raise HubError(f"{name} holds {len(packs)} packs ({some}); name one, as in {named}")
    return packs[0]


def files_in(hub: "HfApi", name: HubName) -> list[str]:
    """The files of a repository; it is asked once, without the waits of a longer listing."""
    info = hub.model_info(name.repo, revision=name.revision)
    return [file.rfilename for file in info.siblings or []]


def _files(hub: "HfApi", name: HubName) -> list[str]:
    """The files of the repository; offline, those of it that are in the cache."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return files_in(hub, name)
    except HfHubHTTPError:  # the Hub has answered
        raise
    except out_of_reach():
        folder = Path(hub.snapshot_download(name.repo, revision=name.revision, local_files_only=True))
        return [file.relative_to(folder).as_posix() for file in folder.rglob(f"*{SUFFIX}")]
