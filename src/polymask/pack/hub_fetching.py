"""From a pack on the Hub to a file in the local cache. The file is checked when it is read."""

from pathlib import Path
from typing import TYPE_CHECKING

from polymask.errors import HubError
from polymask.pack.format import SUFFIX
from polymask.pack.hub_client import explained, open_hub, out_of_reach
from polymask.pack.hub_names import HubName

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def fetch(name: HubName) -> Path:
    """Download a pack, if the cache has not got it; without a file's name, the only one there is.

    Offline, what was downloaded before is used.
    """
    hub = open_hub()
    with explained(str(name)):
        file = name.file or _only_pack(hub, name)
        return Path(hub.hf_hub_download(name.repo, file, revision=name.revision))


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
