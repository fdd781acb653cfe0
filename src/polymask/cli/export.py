"""Verbs from packs to other formats: merge, export."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polymask.cli.verb import PackVerb, image_files, size_text
from polymask.errors import DomainError, ExportError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True)
class MergeVerb(PackVerb):
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
            f"{result['state_dict']}: {result['tensors']} tensors, {size_text(result['bytes'])}; load "
            f"it into {result['base']} with the domain's number of classes"
        )


@dataclass(kw_only=True)
class ExportVerb(PackVerb):
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

    def needs(self) -> list[str]:
        return ["onnx", "onnxruntime", "onnxscript"] if self.onnx else []

    def run(self) -> dict[str, Any]:
        from polymask.conversion.export import export_domain
        from polymask.data.preprocess import Preprocess

        out = self.onnx or self.torch_export
        if out is None or (self.onnx and self.torch_export):
            raise ExportError("give one file to write: --onnx FILE or --torch-export FILE")
        if self.images and self.no_check:
            raise ExportError("--images says what to check with, and --no-check not to; give one")
        if out.exists() and not self.force:
            raise ExportError(f"{out} exists; give another file, or --force to replace it")
        files = image_files(self.images or [])
        base, domain = self.open_domain()
        preprocess = Preprocess(domain.input)
        self.say(f"exporting {self.pack}: {domain.method.name} on {base.name}, about a minute")
        exported = export_domain(
            base,
            domain,
            out,
            "torch-export" if self.onnx is None else "onnx",
            with_normalisation=self.with_normalisation,
            images=preprocess.pixels([preprocess.read(file) for file in files]) if files else None,
            check=not self.no_check,
            force=self.force,
        )
        return exported.to_json()

    def present(self, result: dict[str, Any], console: "Console") -> None:
        fed, given = result["description"]["input"], result["description"]["output"]
        shapes = [" × ".join(map(str, part["shape"])) for part in (fed, given)]
        opset = f", opset {result['opset']}" if result["opset"] else ""
        console.print(f"{result['file']}: {size_text(result['bytes'])}{opset}")
        console.print(f"{fed['name']}: {fed['type']} {shapes[0]}; {given['name']}: {shapes[1]}")
        if result["checked_images"]:
            console.print(f"checked on {result['checked_images']} images: within {result['difference']:.1e} of PyTorch")
