"""How a pack on the Hub is named: hf:USER/REPO[@REVISION][/FILE]. Imports nothing heavy."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote

from polymask.errors import HubError

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
    from polymask.pack.hub_fetching import fetch

    text = path.as_posix() if isinstance(path, Path) else path
    return fetch(HubName.parse(text))
