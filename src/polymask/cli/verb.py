"""What verbs have in common: where results go, and how a base, a pack, images and a recipe are given."""

import glob
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Optional

import tyro

from polymask.errors import DataError, DomainError, PolymaskError
from polymask.train.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.core.base import Base
    from polymask.core.domain import Domain
    from polymask.core.input import InputSpec
    from polymask.data.images import DomainData
    from polymask.train.learn import Loaders


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
        """Do the work; the result can be written as JSON."""

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
        error_console().print(message, soft_wrap=True)


def error_console() -> "Console":
    """The console for everything that is not a result."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@dataclass(kw_only=True)
class BaseVerb(Verb):
    """A command that needs a base."""

    weights: Path | None = None
    """A state dict for the base, where it does not come with its weights."""
    device: str = "cpu"
    """Where to compute."""

    def open_base(self, name: str) -> "Base":
        """Load the base of this name."""
        from polymask.nets.zoo import load_base

        return load_base(name, weights=self.weights, device=self.device)


@dataclass(kw_only=True)
class NamedPack(Verb):
    """A command that needs a pack."""

    pack: tyro.conf.Positional[Path]
    """A pack's file, a domain's name in the library, or hf:USER/REPO on the Hugging Face Hub."""
    library: Path = Path("library")
    """Where a domain is looked for by its name."""

    def pack_path(self) -> Path:
        """The pack's file; one of the Hub is downloaded unless the cache has it."""
        from polymask.pack.hub import is_hub_name, local_pack

        if is_hub_name(self.pack):
            return local_pack(self.pack)
        named = self.library / f"{self.pack}.safetensors"
        return named if named.is_file() and not self.pack.is_file() else self.pack


@dataclass(kw_only=True)
class PackVerb(NamedPack, BaseVerb):
    """A command that needs a domain."""

    base: str | None = None
    """The base, where it is not the one that the pack names."""

    def open_domain(self) -> "tuple[Base, Domain]":
        """Load the pack and the base that it was made for."""
        from polymask.pack.format import inspect
        from polymask.pack.storing import load_domain

        path = self.pack_path()
        base = self.open_base(self.base or inspect(path).manifest.base)
        return base, load_domain(path, base)


@dataclass(kw_only=True)
class ImagesVerb(Verb):
    """A command that reads a domain's images and writes one file."""

    seed: int = 0
    """Seeds the split of the data, the initial values and the order of the images."""
    limit: int | None = None
    """The most training images to use."""
    cache: Path | None = None
    """A folder that keeps decoded images for the next run."""
    force: bool = False
    """Replace the file of an earlier run."""

    @property
    def leads(self) -> bool:
        """Whether this process, of several that do it together, writes files and talks."""
        return True

    def check_free(self, target: Path) -> None:
        """Raise where a file would be replaced without --force."""
        if target.exists() and not self.force:
            raise DomainError(f"{target} exists; choose another name, or --force to replace it")

    def make_folder(self, folder: Path, *files: Path) -> None:
        """Make a folder, and clear away what a run that was killed has left of these files."""
        from polymask.files import remove_leftovers

        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PolymaskError(f"{folder} cannot be made: {error.strerror}") from error
        for file in files:
            remove_leftovers(file)

    def loaders(self, data: "DomainData", spec: "InputSpec", recipe: Recipe) -> "Loaders":
        """The batches, made while a bar shows how many images have been read."""
        from polymask.train.learn import make_loaders
        from polymask.train.progress import reading_bar

        with reading_bar(disable=not self.leads) as progress:
            return make_loaders(data, spec, recipe, seed=self.seed, cache=self.cache, progress=progress)


def image_files(words: list[str]) -> list[Path]:
    """The files that words of a command stand for: files, patterns, or folders with all images in them."""
    from polymask.data.folders import SUFFIXES

    found: list[Path] = []
    for word in words:
        path = Path(word)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
        elif path.is_file():
            inside = [path]
        else:
            inside = [Path(match) for match in sorted(glob.glob(word, recursive=True))]  # noqa: PTH207
        if not inside:
            raise DataError(f"{word} matches no image; give files, folders or patterns")
        found += inside
    return found


def recipe_overrides(name: str, *, without: Collection[str]) -> Any:
    """A dataclass of a recipe's fields but some, each None unless it is given."""
    kept = [(f.name, Optional[f.type], None) for f in fields(Recipe) if f.name not in without]  # noqa: UP045
    options: Any = make_dataclass(name, kept, kw_only=True)
    options.__doc__ = "Fields of the recipe to change; each is as the recipe has it unless given."
    return options


def given_fields(overrides: Any) -> dict[str, Any]:
    """Those of the fields that were given."""
    values = {f.name: getattr(overrides, f.name) for f in fields(overrides)}
    return {name: value for name, value in values.items() if value is not None}


def table(*headings: str, rows: list[list[str]]) -> Any:
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


def number_text(value: float | None, deviation: float | None = None, *, places: int = 2, unit: str = "") -> str:
    """A number, with its deviation where there is one; a dash where there is no number."""
    if value is None:
        return "–"
    spread = "" if deviation is None else f" ± {deviation:.{places}f}"
    return f"{value:.{places}f}{spread}{unit}"
