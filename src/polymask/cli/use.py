"""Verbs that use a domain: evaluate, predict, merge, export, push."""

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from polymask.cli.verb import BaseVerb, NamedPack, table
from polymask.errors import DataError, DomainError, ExportError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from polymask.core.base import Base
    from polymask.core.domain import Domain
    from polymask.core.input import InputSpec


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
class Evaluate(PackVerb):
    """Measure a domain's accuracy on the test images of a source."""

    data: str
    """A folder of images, or another source (see the documentation of `learn`)."""
    split: str = "test"
    """Which images: train, val or test."""
    seed: int = 0
    """The seed that cut the source into splits, where it has none of its own."""

    def run(self) -> dict[str, Any]:
        from polymask.data.cache import cache_splits
        from polymask.data.load import load_data
        from polymask.data.loader import Loader
        from polymask.data.preprocess import eval_transform
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
        preprocess = eval_transform(data, domain.input)
        (cache,) = cache_splits([splits[self.split]], preprocess.shrink)
        loader = Loader(cache, preprocess, batch_size=64)
        accuracy = evaluate(base, domain, loader)
        return {"pack": str(self.pack_path()), f"{self.split}_accuracy": accuracy, "images": len(cache)}

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

        from polymask.files import write_atomically

        if self.out.exists() and not self.force:
            raise DomainError(f"{self.out} exists; give another --out, or --force to replace it")
        base, domain = self.open_domain()
        state = {n: t.detach().cpu().contiguous() for n, t in domain.merged(base).state_dict().items()}
        write_atomically(self.out, save(state, {"format": "pt"}))
        size = self.out.stat().st_size
        return {"state_dict": str(self.out), "tensors": len(state), "bytes": size, "base": base.name}

    def present(self, result: dict[str, Any], console: "Console") -> None:
        console.print(
            f"{result['state_dict']}: {result['tensors']} tensors, {result['bytes']:,} bytes; load "
            f"it into {result['base']} with the domain's number of classes"
        )


def find_images(patterns: list[str]) -> list[Path]:
    """The files that words of a command stand for; folders stand for the images in them."""
    from polymask.data.folders import SUFFIXES

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


@dataclass(kw_only=True)
class Export(PackVerb):
    """Write a domain's network for other runtimes: ONNX or torch.export."""

    onnx: Path | None = None
    """The ONNX file to write."""
    torch_export: Path | None = None
    """The torch.export archive (.pt2) to write."""
    with_normalisation: bool = False
    """Put the scaling of pixels into the network: it takes uint8 images."""
    images: list[str] | None = None
    """Images to check the export with (files, folders, patterns), in place of made ones."""
    no_check: bool = False
    """Do not run the export beside PyTorch before it is written."""
    force: bool = False
    """Replace the file if it exists."""

    def run(self) -> dict[str, Any]:
        from polymask.conversion.export import export_domain

        if (self.onnx is None) == (self.torch_export is None):
            raise ExportError("give one file to write: --onnx FILE or --torch-export FILE")
        if self.images and self.no_check:
            raise ExportError("--images says what to check with, and --no-check not to; give one")
        out = self.onnx or self.torch_export
        assert out is not None
        if out.exists() and not self.force:
            raise ExportError(f"{out} exists; give another file, or --force to replace it")
        files = find_images(self.images) if self.images else []
        base, domain = self.open_domain()
        self.say(f"exporting {self.pack}: {domain.method.name} on {base.name}, about a minute")
        exported = export_domain(
            base,
            domain,
            out,
            "torch-export" if self.onnx is None else "onnx",
            with_normalisation=self.with_normalisation,
            images=read_pixels(files, domain.input) if files else None,
            check=not self.no_check,
            force=self.force,
        )
        return exported.to_json()

    def present(self, result: dict[str, Any], console: "Console") -> None:
        fed, given = result["description"]["input"], result["description"]["output"]
        shapes = [" × ".join(map(str, part["shape"])) for part in (fed, given)]
        opset = f", opset {result['opset']}" if result["opset"] else ""
        console.print(f"{result['file']}: {result['bytes']:,} bytes{opset}")
        console.print(f"{fed['name']}: {fed['type']} {shapes[0]}; {given['name']}: {shapes[1]}")
        if result["checked_images"]:
            console.print(f"checked on {result['checked_images']} images: within {result['difference']:.1e} of PyTorch")


def read_pixels(files: list[Path], spec: "InputSpec") -> "Tensor":
    """Image files as the pixels that a domain sees: uint8 (N, C, H, W)."""
    from polymask.data.preprocess import Preprocess

    preprocess = Preprocess(spec)
    return preprocess.pixels([preprocess.read(file) for file in files])


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
        from polymask.report.card import push

        base, domain = self.open_domain()
        self.say(f"pushing {self.pack} ({domain.method.name} on {base.name}) to {self.repo}")
        commit = push(
            domain,
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
