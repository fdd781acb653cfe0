"""The verb that turns what was fine-tuned elsewhere into a pack: convert."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from polymask.cli.verb import BaseVerb, given, recipe_overrides, table
from polymask.errors import DomainError, PolymaskError
from polymask.train.recipe import Recipe, get_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.conversion.convert import Converted
    from polymask.conversion.finetuned import Finetuned
    from polymask.core.base import Base
    from polymask.data.images import DomainData
    from polymask.train.learn import Loaders

_DECIDED = ("name", "side", "resized", "norms")  # by the checkpoint, not by a recipe
TrainingOverrides: Any = recipe_overrides("TrainingOverrides", without=_DECIDED)


@dataclass(kw_only=True)
class Convert(BaseVerb):
    """Turn a network that was fine-tuned from a base into a one-bit pack."""

    checkpoint: tyro.conf.Positional[Path]
    """Its state dict: .safetensors, or a .pth that holds nothing but tensors."""
    base: str
    """The base that it was fine-tuned from: built-in, timm:NAME, torchvision:NAME or a file."""
    name: str
    """The domain's name: its pack becomes LIBRARY/NAME.safetensors."""
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
    seed: int = 0
    """Rules the cut of the data and the order of the images."""
    limit: int | None = None
    """At most so many training images."""
    cache: Path | None = None
    """A folder that keeps decoded images for the next run."""
    force: bool = False
    """Replace a domain of this name."""
    overrides: TrainingOverrides = field(default_factory=TrainingOverrides)

    def run(self) -> dict[str, Any]:
        from polymask.conversion.finetuned import Finetuned
        from polymask.data.load import load_data
        from polymask.files import check_name

        check_name(self.name)
        pack = self.out / f"{self.name}.safetensors"
        if pack.exists() and not self.force:
            raise DomainError(f"{pack} exists; choose another name, or --force to replace it")
        if self.train_masks and self.data is None:
            raise DomainError("--train-masks needs labelled images; give --data")
        recipe = get_recipe(self.recipe, **given(self.overrides))
        names = None if self.classes is None else read_classes(self.classes)
        base = self.open_base(self.base)
        tuned = Finetuned.read(base, self.checkpoint)
        data = None
        if self.data is not None:
            data = load_data(self.data, seed=self.seed, limit=self.limit)
        converted = self._convert(base, tuned, names, data, recipe)
        converted.domain.save(pack)
        return self._result(pack, converted)

    def present(self, result: dict[str, Any], console: "Console") -> None:
        rows = [
            ["pack", result["pack"]],
            ["method", result["method"]],
            ["size", f"{result['bytes']:,} bytes"],
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

    def _convert(
        self, base: "Base", tuned: "Finetuned", names: list[str] | None, data: "DomainData | None", recipe: Recipe
    ) -> "Converted":
        from polymask.cli.progress import LiveProgress
        from polymask.conversion.convert import convert, name_outputs, recipe_at
        from polymask.files import remove_leftovers

        recipe = recipe_at(base, recipe, self.side)
        name_outputs(tuned, names, data)  # a wrong number of them is found before images are read
        self.say(
            f"[bold]{self.name}[/]: {tuned.classes} classes from {self.checkpoint}, base "
            f"{base.name} at {recipe.side} px, library {self.out}"
        )
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PolymaskError(f"{self.out} cannot be made: {error.strerror}") from error
        remove_leftovers(self.out / f"{self.name}.safetensors")
        converted = convert(
            base,
            tuned,
            classes=names,
            data=data,
            side=self.side,
            recipe=recipe,
            statistics=self.statistics,
            steps=self.scale_steps,
            rate=self.scale_rate,
            train_masks=self.train_masks,
            loaders=None if data is None else self._loaders(data, base, recipe),
            seed=self.seed,
            listener=LiveProgress(self.name),
        )
        for note in converted.notes:
            self.say(f"[dim]{note}[/]")
        return converted

    def _loaders(self, data: "DomainData", base: "Base", recipe: Recipe) -> "Loaders":
        from rich.progress import Progress

        from polymask.cli.progress import error_console
        from polymask.train.learn import make_loaders

        with Progress(console=error_console(), transient=True) as bar:
            task = bar.add_task("  reading images", total=None)
            return make_loaders(
                data,
                base.input,
                recipe,
                seed=self.seed,
                cache=self.cache,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )

    def _result(self, pack: Path, converted: "Converted") -> dict[str, Any]:
        outputs, unrefined = converted.outputs, converted.unrefined
        domain = converted.domain
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


def read_classes(path: Path) -> list[str]:
    """The class names of a file, one a line; empty lines are none."""
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
    rows = [
        ["outputs compared on", f"{after['images']:,} {after['split']} images"],
        ["error of the logits", f"{_share(after)} (before refinement {_share(before)})"],
        ["mean and largest difference", f"{after['mean']:.3g} and {after['max']:.3g}"],
        ["same first class", f"{after['agreement']:.1f} % (before {before['agreement']:.1f} %)"],
    ]
    if after["pack_accuracy"] is not None:
        both = f"{after['pack_accuracy']:.2f} %, of the checkpoint "
        rows.append(["accuracy", both + f"{after['checkpoint_accuracy']:.2f} %"])
    return rows


def _share(outputs: dict[str, Any]) -> str:
    return f"{100 * outputs['relative']:.1f} %"
