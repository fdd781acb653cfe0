"""How a command names a pack: by its file, its name in the library, or its place on the Hub."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from polymask.cli.verb import Verb


@dataclass(kw_only=True)
class NamedPack(Verb):
    """A command that needs a pack."""

    pack: tyro.conf.Positional[Path]
    """A pack's file, a domain's name in the library, or hf:USER/REPO on the Hugging Face Hub."""
    library: Path = Path("library")
    """Where a domain is looked for by its name."""

    def pack_path(self) -> Path:
        """The pack's file; one of the Hub is downloaded if the cache has not got it."""
        from polymask.pack.hub_names import is_hub_name, local_pack

        if is_hub_name(self.pack):
            return local_pack(self.pack)
        named = self.library / f"{self.pack}.safetensors"
        return named if named.is_file() and not self.pack.is_file() else self.pack
