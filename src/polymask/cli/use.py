"""Verbs that use a domain: evaluate, predict, merge."""

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from polymask.cli.pack_names import NamedPack
from polymask.cli.verb import BaseVerb, table
from polymask.errors import DataError, DomainError

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.core.base import Base
    from polymask.core.domain import Domain


@dataclass(kw_only=True)
class PackVerb(NamedPack, BaseVerb):
    """A command that needs a domain."""

    base: str | None = None
    """The base, where it is not the one that the pack names."""

    def open_domain(self) -> "tuple[Base, Domain]":
        """Load the pack and the base that it was made for."""
        from polymask.pack.format import inspect
        from polymask.pack.loading import load_domain

        path = self.pack_path()
        base = self.open_base(self.base or inspect(path).manifest.base)
        return base, load_domain(path, base)


@dataclass(kw_only=True)
class Evaluate(PackVerb):
    """Measure a domain's accuracy on the test images of a source."""

    data: str
    """A folder of images, or another source (see the documentation of `learn`)."""
    split: str = "test"
    """Which images: train, val or test."""
    seed: int = 0
    """The seed that cut the source into splits, where it has none of its own."""

    def run(self) -> dict[str, Any]:
        from polymask.data.cache import cache_splits, shrink_for
        from polymask.data.load import load_data
        from polymask.data.loader import Loader
        from polymask.data.transforms import eval_transform
        from polymask.train.predict import evaluate

        data = load_data(self.data, seed=self.seed)
        splits = data.splits()
        if self.split not in splits:
            raise DataError(f"{self.data} has no {self.split} images; it has {', '.join(splits)}")
        base, domain = self.open_domain()
        if list(data.classes) != domain.classes:
            raise DomainError(
                f"the classes of {self.data} ({_some(data.classes)}) are not those of the domain "
                f"({_some(domain.classes or [])}); evaluate on images of the same classes"
            )
        (cache,) = cache_splits([splits[self.split]], shrink_for(data, domain.input))
        loader = Loader(cache, eval_transform(data, domain.input), batch_size=64)
        accuracy = evaluate(base, domain, loader)
        return {
            "pack": str(self.pack_path()),
            f"{self.split}_accuracy": accuracy,
            "images": len(cache),
        }

    def present(self, result: dict[str, Any], console: "Console") -> None:
        accuracy = result[f"{self.split}_accuracy"]
        console.print(f"{accuracy:.2f} % of {result['images']:,} {self.split} images")


@dataclass(kw_only=True)
class Predict(PackVerb):
    """Say what is on images: files, folders or patterns."""

    images: tyro.conf.Positional[list[str]]
    """Files, folders or patterns (quote them)."""
    top_k: int = 3
    """How many classes to name for each image."""

    def run(self) -> list[dict[str, Any]]:
        from polymask.train.predict import predict_files

        if self.top_k < 1:
            raise DataError(f"top-k {self.top_k} must be at least 1")
        files = find_images(self.images)
        base, domain = self.open_domain()
        if domain.classes is None:
            raise DomainError(f"{self.pack} has no classes: it gives features, not predictions")
        rows = []
        for file, shares in zip(files, predict_files(base, domain, files), strict=True):
            values, places = shares.topk(min(self.top_k, len(domain.classes)))
            top = [
                {"class": domain.classes[place], "probability": value}
                for place, value in zip(places.tolist(), values.tolist(), strict=True)
            ]
            rows.append({"image": str(file), "top": top})
        return rows

    def present(self, result: list[dict[str, Any]], console: "Console") -> None:
        rows = [[row["image"]] + [f"{t['class']} {100 * t['probability']:.1f} %" for t in row["top"]] for row in result]
        places = ["first", "second", "third"] + [f"{n}th" for n in range(4, self.top_k + 1)]
        headings = places[: len(rows[0]) - 1]
        console.print(table("image", *headings, rows=rows))


@dataclass(kw_only=True)
class Merge(PackVerb):
    """Write a domain's network as an ordinary state dict (safetensors)."""

    out: Path
    """The file to write."""
    force: bool = False
    """Replace the file if it exists."""

    def run(self) -> dict[str, Any]:
        from safetensors.torch import save

        from polymask.pack.format import write_atomically

        if self.out.exists() and not self.force:
            raise DomainError(f"{self.out} exists; give another --out, or --force to replace it")
        base, domain = self.open_domain()
        state = {n: t.detach().cpu().contiguous() for n, t in domain.merged(base).state_dict().items()}
        write_atomically(self.out, save(state, {"format": "pt"}))
        size = self.out.stat().st_size
        return {
            "state_dict": str(self.out),
            "tensors": len(state),
            "bytes": size,
            "base": base.name,
        }

    def present(self, result: dict[str, Any], console: "Console") -> None:
        console.print(
            f"{result['state_dict']}: {result['tensors']} tensors, {result['bytes']:,} bytes; load "
            f"it into {result['base']} with the domain's number of classes"
        )


def find_images(patterns: list[str]) -> list[Path]:
    """The files that words of a command stand for; folders stand for the images in them."""
    from polymask.data.folder import SUFFIXES

    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
        elif path.is_file():
            inside = [path]
        else:
            inside = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207
        if not inside:
            raise DataError(f"{pattern} stands for no image; give files, folders or patterns")
        found += inside
    return found


def _some(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:4]) + (f" … {len(names)} in all" if len(names) > 4 else "")
