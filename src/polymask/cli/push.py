"""The verb that puts a domain on the Hugging Face Hub."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tyro

from polymask.cli.use import PackVerb

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True)
class Push(PackVerb):
    """Put a domain on the Hugging Face Hub, with a model card."""

    repo: tyro.conf.Positional[str]
    """USER/REPO; it is made if it is not there."""
    name: str | None = None
    """The pack's name in the repository; the repository's own where none is given."""
    private: bool = False
    """Make the repository private, if it is made."""
    license: str | None = None
    """The licence of the pack, as the Hub abbreviates it (apache-2.0, mit, …)."""
    message: str | None = None
    """What the commit says."""
    revision: str | None = None
    """The branch."""
    force: bool = False
    """Replace a pack of the same name."""

    def run(self) -> dict[str, Any]:
        base, domain = self.open_domain()
        self.say(f"pushing {self.pack} ({domain.method.name} on {base.name}) to {self.repo}")
        commit = domain.push_to_hub(
            self.repo,
            name=self.name,
            private=self.private or None,
            license=self.license,
            message=self.message,
            revision=self.revision,
            force=self.force,
        )
        return {"repo": self.repo, "commit": commit, "load": f"hf:{self.repo}"}

    def present(self, result: dict[str, Any], console: "Console") -> None:
        console.print(f"{result['commit']}", soft_wrap=True)
        console.print(f"load it as {result['load']}", soft_wrap=True)
