"""Verbs between packs and other formats: convert, merge, export."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from polymask.cli.verb import (
    BaseVerb,
    ImagesVerb,
    PackVerb,
    given_fields,
    image_files,
    recipe_overrides,
    size_text,
    table,
)
from polymask.errors import DomainError, ExportError
from polymask.train.recipe import get_recipe

if TYPE_CHECKING:
    from rich.console import Console

_DECIDED = ("name", "side", "resized", "norms")  # by the checkpoint, not by a recipe
TrainingOverrides: Any = recipe_overrides("TrainingOverrides", without=_DECIDED)


@dataclass(kw_only=True)
class ConvertVerb(ImagesVerb, BaseVerb):
    """Turn a network that was fine-tuned from a base into a one-bit pack."""

    checkpoint: tyro.conf.Positional[Path]
    """Its state dict: .safetensors, or a .pth that holds nothing but tensors."""
    base: str
    """The base that it was fine-tuned from: built-in, timm:NAME, torchvision:NAME or a file."""
    name: str
    """The domain's name: its pack becomes LIBRARY/NAME.safetensors."""
    method: str = "bitdelta"
    """bitdelta: a size a layer; bitdelta-row, bitdelta-column: one for each output or input channel."""
    data: str | None = None
    """Images as for `learn`: the scales are refined on them, and the outputs compared."""
    classes: Path | None = None
    """A file of class names in the order of the outputs, one a line; else those of the data."""
    side: int | None = None
    """The size in pixels that it was trained at, where that is not the base's."""
    statistics: Literal["auto", "checkpoint", "images"] = "auto"
    """Whose batch-norm statistics to keep; auto: those that bring the outputs nearer on val."""
    scale_steps: int = 200
    """Steps of distillation that refine the scales."""
    scale_rate: float = 3e-2
    """The rate of these steps, in proportion to a scale."""
    train_masks: bool = False
    """Learn on as affine-full from here, by the labels and the recipe."""
    recipe: str = "quick"
    """For the images and --train-masks: a recipe's name or a .toml file, as for `learn`."""
    out: Path = Path("library")
    """The library's folder."""
    overrides: TrainingOverrides = field(default_factory=TrainingOverrides)

    def run(self) -> dict[str, Any]:
        from polymask.conversion.convert import convert, name_outputs, one_bit_method, recipe_at
        from polymask.conversion.finetuned import Finetuned
        from polymask.data.load import load_data
        from polymask.files import check_name
        from polymask.train.progress import LiveProgress

        check_name(self.name)
        pack = self.out / f"{self.name}.safetensors"
        self.check_settings(self.out)
        self.check_free(pack)
        if self.train_masks and self.data is None:
            raise DomainError("--train-masks needs labelled images; give --data")
        one_bit_method(self.method, masks=self.train_masks)
        recipe = get_recipe(self.recipe, **given_fields(self.overrides))
        names = None if self.classes is None else read_classes(self.classes)
        base = self.open_base(self.base)
        tuned = Finetuned.read(base, self.checkpoint)
        data = None if self.data is None else load_data(self.data, seed=self.seed, limit=self.limit)
        recipe = recipe_at(base, recipe, self.side)
        name_outputs(tuned, names, data)  # a wrong number of them is found before images are read
        self.say(
            f"{self.name}: {tuned.classes} classes from {self.checkpoint}, base "
            f"{base.name} at {recipe.side} px, library {self.out}"
        )
        self.say_device(base.device)
        self.make_folder(self.out)
        converted = convert(
            base,
            tuned,
            method=self.method,
            classes=names,
            data=data,
            side=self.side,
            recipe=recipe,
            statistics=self.statistics,
            steps=self.scale_steps,
            rate=self.scale_rate,
            train_masks=self.train_masks,
            loaders=None if data is None else self.loaders(data, base.input, recipe),
            seed=self.seed,
            listener=LiveProgress(self.name),
        )
        for note in converted.notes:
            self.say(note, style="dim")
        domain, outputs, unrefined = converted.domain, converted.outputs, converted.unrefined
        domain.save(pack)
        return {
            "pack": str(pack),
            "method": domain.method.name,
            "base": domain.base_name,
            "bytes": pack.stat().st_size,
            "bits_per_weight": domain.metrics["bits_per_weight"],
            "test_accuracy": domain.metrics["test_accuracy"],
            "weights": asdict(converted.weights),
            "outputs": None if outputs is None else asdict(outputs),
            "outputs_unrefined": None if unrefined is None else asdict(unrefined),
            "left": converted.left,
            "notes": list(converted.notes),
        }

    def present(self, result: dict[str, Any], console: "Console") -> None:
        rows = [
            ["pack", result["pack"]],
            ["method", result["method"]],
            ["size", size_text(result["bytes"])],
            ["bits per weight", f"{result['bits_per_weight']:.3f}"],
            ["change missed in the weights", f"{100 * result['weights']['error']:.1f} %"],
        ]
        console.print(table("", "", rows=rows + _output_rows(result)))
        worst = sorted(result["weights"]["sites"].items(), key=lambda site: -site[1])[:3]
        if worst:
            named = ", ".join(f"{name} ({100 * error:.0f} %)" for name, error in worst)
            console.print(f"farthest from the checkpoint: {named}", style="dim")
        if result["left"]:
            named = ", ".join(f"{name} (by {most:.2g})" for name, most in result["left"].items())
            console.print(f"left as the base has them, though changed: {named}")
        console.print(f"try: polymask predict {self.name} IMAGE --library {self.out}", style="dim")


def read_classes(path: Path) -> list[str]:
    """The class names of a file, one a line; empty lines are skipped."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DomainError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DomainError(f"{path} is not a text in UTF-8: {error.reason}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _output_rows(result: dict[str, Any]) -> list[list[str]]:
    """What the images showed, after and before the refinement."""
    after, before = result["outputs"], result["outputs_unrefined"]
    if after is None:
        return [["outputs", "not compared: give --data"]]
    error, unrefined = (f"{100 * outputs['relative']:.1f} %" for outputs in (after, before))
    rows = [
        ["outputs compared on", f"{after['images']:,} {after['split']} images"],
        ["error of the logits", f"{error} (before refinement {unrefined})"],
        ["mean and largest difference", f"{after['mean']:.3g} and {after['max']:.3g}"],
        ["same first class", f"{after['agreement']:.1f} % (before {before['agreement']:.1f} %)"],
    ]
    if after["pack_accuracy"] is not None:
        pack, checkpoint = after["pack_accuracy"], after["checkpoint_accuracy"]
        rows.append(["accuracy", f"{pack:.2f} %, of the checkpoint {checkpoint:.2f} %"])
    return rows


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
