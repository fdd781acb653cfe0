"""From a domain to a repository on the Hub: its pack, a model card and a figure in one commit."""

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from polymask.core.domain import Domain
from polymask.errors import HubError
from polymask.pack.format import SUFFIX, inspect
from polymask.pack.hub_client import explained, open_hub
from polymask.pack.hub_fetching import files_in
from polymask.pack.hub_names import PREFIX, HubName
from polymask.report.card import MARK, Card

if TYPE_CHECKING:
    from huggingface_hub import HfApi

README = "README.md"


def push_domain(
    domain: Domain,
    repo: str,
    *,
    name: str | None = None,
    private: bool | None = None,
    license: str | None = None,
    message: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    force: bool = False,
) -> str:
    """Put a domain on the Hub; the address of the commit. See `Domain.push_to_hub`."""
    from polymask.library.model import check_name

    place = HubName.parse(f"{PREFIX}{repo}")
    if place.file or place.revision:
        raise HubError(f"{repo} is no repository; write USER/REPO")
    name = name or repo.partition("/")[2]
    check_name(name)
    hub, pack = open_hub(token), f"{name}{SUFFIX}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / pack
        domain.save(file)  # checks the domain before anything is created
        with explained(repo):
            hub.create_repo(repo, private=private, exist_ok=True)
            there = files_in(hub, HubName(repo, revision))
            if pack in there and not force:
                raise HubError(
                    f"{repo} has {pack} already; push under another name, or by force (earlier "
                    "versions stay in the repository's history)"
                )
            files = _files(hub, domain, file, HubName(repo, revision), license, there)
            return _commit(hub, repo, files, message or f"Add {pack}", revision)


def _files(
    hub: "HfApi",
    domain: Domain,
    file: Path,
    place: HubName,
    license: str | None,
    there: list[str],
) -> dict[str, bytes]:
    """The files of the commit, by their paths in the repository."""
    pack = file.name
    alone = not any(other.endswith(SUFFIX) and other != pack for other in there)
    files = {pack: file.read_bytes()}
    drawing = _figure(domain)
    figure = f"{pack.removesuffix(SUFFIX)}.masks.svg" if drawing else None
    if figure and drawing:
        files[figure] = drawing.encode()
    if README not in there or _is_ours(hub, place, pack):
        card = Card(
            title=pack.removesuffix(SUFFIX),
            name=str(HubName(place.repo, place.revision, None if alone else pack)),
            pack=pack,
            info=inspect(file),
            domain=domain,
            figure=figure,
            license=license,
        )
        files[README] = card.text().encode()
    return files


def _is_ours(hub: "HfApi", place: HubName, pack: str) -> bool:
    """Whether the card that is there was written for this pack, and not edited since."""
    path = Path(hub.hf_hub_download(place.repo, README, revision=place.revision))
    return MARK.format(pack=pack) in path.read_text(errors="replace")


def _figure(domain: Domain) -> str | None:
    """The ones in the masks by layer, as an SVG file; None without masks or matplotlib."""
    from polymask.report.masks import mask_statistics

    layers = mask_statistics(domain)
    if not layers or find_spec("matplotlib") is None:
        return None
    from polymask.report.canvas import as_file
    from polymask.report.figures import density_by_depth

    return as_file(density_by_depth({domain.method.name: layers}, name="masks"))


def _commit(hub: "HfApi", repo: str, files: dict[str, bytes], message: str, revision: str | None) -> str:
    from huggingface_hub import CommitOperationAdd

    done = hub.create_commit(
        repo,
        [CommitOperationAdd(path, content) for path, content in files.items()],
        commit_message=message,
        revision=revision,
    )
    return str(done.commit_url)
