"""What verbs have in common: where results go, and how a base, a pack and the fields of a recipe are given."""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Optional

import tyro

from polymask.train.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.core.base import Base


@dataclass(kw_only=True)
class Verb(ABC):
    """One command."""

    json: bool = False
    """Print the results as one JSON object."""
    debug: bool = False
    """Show the traceback of an error."""

    in_ranks: ClassVar[bool] = False  # several processes of torchrun can do it together

    @abstractmethod
    def run(self) -> Any:
        """Do the work; what is returned can be written as JSON."""

    @abstractmethod
    def present(self, result: Any, console: "Console") -> None:
        """Print the result for a person."""

    def execute(self) -> None:
        """Do the work and print its result."""
        result = self.run()
        if self.json:
            json.dump(result, sys.stdout, indent=1)
            print()
        else:
            from rich.console import Console

            self.present(result, Console(highlight=False))

    def say(self, message: str) -> None:
        """A message for a person, on standard error."""
        from rich.console import Console

        Console(stderr=True, highlight=False).print(message, soft_wrap=True)


@dataclass(kw_only=True)
class BaseVerb(Verb):
    """A command that needs a base."""

    weights: Path | None = None
    """A state dict for the base, where it is not one that comes with its weights."""
    device: str = "cpu"
    """Where to compute."""

    def open_base(self, name: str) -> "Base":
        """Load the base of this name."""
        from polymask.nets.zoo import load_base

        return load_base(name, weights=self.weights, device=self.device)


def table(*headings: str, rows: "list[list[str]]") -> Any:
    """A plain table: text to the left, numbers to the right."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column, heading in enumerate(headings):
        cells = [row[column] for row in rows]
        numeric = bool(cells) and all(cell[:1].isdigit() or cell in ("", "–") for cell in cells)
        grid.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def recipe_overrides(name: str, *, without: Collection[str]) -> Any:
    """A dataclass of a recipe's fields but some, each None unless it is given."""
    kept = [f for f in fields(Recipe) if f.name not in without]
    options: Any = make_dataclass(
        name,
        [(f.name, Optional[f.type], None) for f in kept],  # noqa: UP045
        kw_only=True,
    )
    options.__doc__ = "Fields of the recipe to change; each is as the recipe has it unless given."
    return options


def given(overrides: Any) -> dict[str, Any]:
    """Those of the fields that were given."""
    values = {f.name: getattr(overrides, f.name) for f in fields(overrides)}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(kw_only=True)
class NamedPack(Verb):
    """A command that needs a pack."""

    pack: tyro.conf.Positional[Path]
    """A pack's file, a domain's name in the library, or hf:USER/REPO on the Hugging Face Hub."""
    library: Path = Path("library")
    """Where a domain is looked for by its name."""

    def pack_path(self) -> Path:
        """The pack's file; one of the Hub is downloaded if the cache has not got it."""
        from polymask.pack.hub import is_hub_name, local_pack

        if is_hub_name(self.pack):
            return local_pack(self.pack)
        named = self.library / f"{self.pack}.safetensors"
        return named if named.is_file() and not self.pack.is_file() else self.pack
