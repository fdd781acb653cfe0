"""The verb that turns fine-tuned checkpoints into packs."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal

import tyro

from polymask.cli.verb import (
    BaseVerb,
    ImagesVerb,
    given_fields,
    recipe_overrides,
    size_text,
    table,
)
from polymask.errors import DomainError
from polymask.pack.format import inspect
from polymask.train.recipe import Recipe, get_recipe

if TYPE_CHECKING:
    from rich.console import Console

_DECIDED = ("name", "side", "resized", "norms")  # by the checkpoint, not by a recipe
TrainingOverrides: Any = recipe_overrides("TrainingOverrides", without=_DECIDED)


@dataclass(kw_only=True)
class ConvertVerb(ImagesVerb, BaseVerb):
    """Turn networks that were fine-tuned from a base into packs of about one bit a weight."""

    checkpoints: tyro.conf.Positional[list[str]]
    """State dicts (.safetensors, or .pth that hold only tensors), or folders of transformers; NAME=FILE names one."""
    base: str
    """The base that they were fine-tuned from: built-in, timm:NAME, torchvision:NAME, transformers:FOLDER or a file."""
    name: str | None = None
    """The domain's name, where there is one checkpoint: its pack becomes LIBRARY/NAME.safetensors; else the file's."""
    method: str = "bitdelta"
    """bitdelta: a size a layer; bitdelta-row, bitdelta-column: one for each output or input channel; tall-mask, emr:
    several checkpoints share one update; affine-full: as --train-masks."""
    data: str | None = None
    """Images as for `learn`: scales are refined on them, and outputs compared; {name} stands for the domain's name."""
    classes: Path | None = None
    """A file of class names in the order of the outputs, one a line, {name} as for --data; else those of the data."""
    side: int | None = None
    """The size in pixels that they were trained at, where that is not the base's."""
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
        from polymask.conversion.convert import convertible
        from polymask.files import check_name
        from polymask.methods.shared_update import SharedUpdate

        if self.method == "affine-full":
            self.method, self.train_masks = "bitdelta", True
        named = named_checkpoints(self.checkpoints, self.name)
        for name in named:
            check_name(name)
        self.check_settings(self.out)
        if self.train_masks and self.data is None:
            raise DomainError("--train-masks needs labelled images; give --data")
        chosen = convertible(self.method, masks=self.train_masks)
        if len(named) == 1 and isinstance(chosen, SharedUpdate):
            raise DomainError(f"{self.method} shares one update among several checkpoints; give more, or take bitdelta")
        if len(named) > 1:
            return self._convert_all(named)
        ((self.name, checkpoint),) = named.items()
        return self._convert_one(checkpoint)

    def _convert_all(self, named: dict[str, Path]) -> dict[str, Any]:
        """Many checkpoints, those that fail listed beside the others."""
        from polymask.conversion.library import Checkpoint, ConvertOptions, convert_all
        from polymask.nets.base_file import checkpoint_classes
        from polymask.train.progress import LiveProgress

        for given, flag in ((self.data, "--data"), (self.classes, "--classes")):
            if given is not None and "{name}" not in str(given):
                raise DomainError(f"{flag} {given} must hold {{name}}, which stands for each domain's name")
        recipe = get_recipe(self.recipe, **given_fields(self.overrides))
        checkpoints = {}
        for name, path in named.items():
            names = (
                checkpoint_classes(path)
                if self.classes is None
                else read_classes(Path(self._named(self.classes, name)))
            )
            data = None if self.data is None else self._named(self.data, name)
            checkpoints[name] = Checkpoint(path, names, data)
        base = self.open_base(self.base)
        self.say(f"{len(named)} checkpoints to {self.method} on {base.name}, library {self.out}")
        self.say_device(base.device)
        self.make_folder(self.out)
        options = ConvertOptions(**self._how(recipe), limit=self.limit, force=self.force)
        rows: list[dict[str, Any]] = []
        for found in convert_all(
            base, checkpoints, self.out, method=self.method, options=options, listener=LiveProgress
        ):
            done = "kept from before" if found.kept else "converted"
            self.say(f"  {len(rows) + 1}/{len(named)} {found.name}: {'not converted' if found.problem else done}")
            rows.append(found.to_json())
        shared = sorted({file for row in rows if row["pack"] and (file := inspect(row["pack"]).manifest.beside)})
        sizes = {file: (self.out / file).stat().st_size for file in shared}
        method = "affine-full" if self.train_masks else self.method
        return {"base": base.name, "method": method, "packs": rows, "shared": sizes}

    def _how(self, recipe: Recipe) -> dict[str, Any]:
        """How each checkpoint is converted."""
        return {
            "recipe": recipe,
            "side": self.side,
            "statistics": self.statistics,
            "steps": self.scale_steps,
            "rate": self.scale_rate,
            "train_masks": self.train_masks,
            "seed": self.seed,
        }

    @staticmethod
    def _named(pattern: str | Path, name: str) -> str:
        return str(pattern).replace("{name}", name)

    def exit_code(self, result: dict[str, Any]) -> int:
        return int(any(row["problem"] for row in result.get("packs", ())))

    def _convert_one(self, checkpoint: Path) -> dict[str, Any]:
        from polymask.conversion.convert import convert, name_outputs, recipe_at
        from polymask.conversion.finetuned import Finetuned
        from polymask.data.load import load_data
        from polymask.nets.base_file import checkpoint_classes
        from polymask.train.progress import LiveProgress

        assert self.name is not None
        pack = self.out / f"{self.name}.safetensors"
        self.check_free(pack)
        recipe = get_recipe(self.recipe, **given_fields(self.overrides))
        names = checkpoint_classes(checkpoint) if self.classes is None else read_classes(self.classes)
        base = self.open_base(self.base)
        tuned = Finetuned.read(base, checkpoint)
        data = None if self.data is None else load_data(self.data, seed=self.seed, limit=self.limit)
        recipe = recipe_at(base, recipe, self.side)
        name_outputs(tuned, names, data)  # a wrong number of them is found before images are read
        self.say(
            f"{self.name}: {tuned.classes} classes from {checkpoint}, base "
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
            loaders=None if data is None else self.loaders(data, base.input, recipe),
            **self._how(recipe),
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
        if "packs" in result:
            _present_all(result, console)
            return
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


def named_checkpoints(words: list[str], name: str | None) -> dict[str, Path]:
    """Checkpoints by their domains' names: as given, else by the names of the files or folders."""
    if not words:
        raise DomainError("no checkpoint is given; polymask convert CHECKPOINTS… --base B")
    if name is not None:
        if len(words) > 1:
            raise DomainError(f"--name {name} is for one checkpoint, and there are {len(words)}; write NAME=FILE")
        return {name: Path(words[0])}
    named: dict[str, Path] = {}
    for word in words:
        before, equals, after = word.partition("=")
        label, path = (before, Path(after)) if equals and not Path(word).exists() else (Path(word).stem, Path(word))
        if label in named:
            raise DomainError(f"{named[label]} and {path} would both be called {label}; write NAME=FILE")
        if not path.exists():
            raise DomainError(f"there is no checkpoint at {path}")
        named[label] = path
    return named


def _present_all(result: dict[str, Any], console: "Console") -> None:
    """A line for each checkpoint, before and after, and what could not be converted."""
    rows = []
    made = [row for row in result["packs"] if row["problem"] is None]
    for row in made:
        tested, was, same = (row["metrics"].get(n) for n in ("test_accuracy", "checkpoint_accuracy", "agreement"))
        cells = ["–" if tested is None or was is None else f"{was:.1f} → {tested:.1f} %"]
        cells.append("–" if same is None else f"{same:.1f} %")
        before, after = (size_text(row[size]).partition(" (")[0] for size in ("checkpoint_bytes", "pack_bytes"))
        rows.append([row["name"], *cells, f"{before} → {after}"])
    if rows:
        console.print(table("domain", "accuracy", "same first class", "size", rows=rows))
    for file, size in result["shared"].items():
        console.print(f"{file}: {size_text(size)}, once for all of them; keep it beside the packs", markup=False)
    before, after = (sum(row[size] for row in made) for size in ("checkpoint_bytes", "pack_bytes"))
    after += sum(result["shared"].values())
    if made:
        console.print(f"{len(made)} of {len(result['packs'])} converted: {size_text(before)} became {size_text(after)}")
    for row in result["packs"]:
        if row["problem"] is not None:
            why = shorten(row["problem"], 300, placeholder=" … (--json has all)")
            console.print(f"not converted: {row['name']}: {why}", style="yellow", markup=False, soft_wrap=True)


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
