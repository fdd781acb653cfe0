"""The verb that writes a domain's network for other runtimes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polymask.cli.use import PackVerb, find_images
from polymask.errors import ExportError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from polymask.core.input import InputSpec


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
    from polymask.data.decode import decode
    from polymask.data.feed import Feed

    feed = Feed(spec)
    crops = [feed.crop(decode(file, str(file), feed.shrink.side)) for file in files]
    return feed.transform.pixels(crops)
