"""Verbs that train: learn, demo."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from polymask.cli.overrides import recipe_overrides
from polymask.cli.verb import BaseVerb, Verb, table
from polymask.errors import DomainError, PolymaskError
from polymask.recipes import Recipe, get_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.learning import Loaders
    from polymask.train import Listener

Overrides: Any = recipe_overrides("Overrides", without=("name",))


@dataclass(kw_only=True)
class Learn(BaseVerb):
    """Teach the base a domain from a folder of images, and write its pack."""

    name: tyro.conf.Positional[str]
    """The domain's name: its pack becomes LIBRARY/NAME.safetensors."""
    data: str
    """A folder (train/ val/ test/ of class folders, or class folders alone), decathlon:ROOT/NAME,
    sketch:ROOT/SET, torchvision:NAME, hf:NAME, or digits, letters, solar-cells."""
    base: str = "efficientnet-lite0"
    """A built-in base, timm:NAME or torchvision:NAME."""
    method: str = "affine-full"
    """See `polymask methods`."""
    recipe: str = "quick"
    """quick, imagenet-to-sketch, decathlon, residual-adapters, or a .toml file."""
    out: Path = Path("library")
    """The library's folder."""
    seed: int = 0
    """Rules the cut of the data, the start and the order of the images."""
    limit: int | None = None
    """At most so many training images."""
    cache: Path | None = None
    """A folder that keeps decoded images for the next run."""
    resume: bool = False
    """Go on where an interrupted run stopped."""
    force: bool = False
    """Replace a domain of this name."""
    tensorboard: bool = False
    """Write TensorBoard events beside the log."""
    overrides: Overrides = field(default_factory=Overrides)

    def run(self) -> dict[str, Any]:
        from polymask.model import check_name

        check_name(self.name)
        pack = self.out / f"{self.name}.safetensors"
        work = self.out / f"{self.name}.run"
        checkpoint = work / "checkpoint.safetensors"
        if pack.exists() and not self.force:
            if not self.resume:
                raise DomainError(f"{pack} exists; choose another name, or --force to replace it")
            if not checkpoint.exists():
                self.say(f"{pack} is there already: nothing to resume")
                return self._result(pack)
        recipe = get_recipe(self.recipe, **self._changes())
        self._train(recipe, pack, work, checkpoint)
        checkpoint.unlink(missing_ok=True)
        return self._result(pack)

    def present(self, result: dict[str, Any], console: "Console") -> None:
        accuracy = result["test_accuracy"]
        rows = [
            ["pack", result["pack"]],
            ["test accuracy", "–" if accuracy is None else f"{accuracy:.2f} %"],
            ["size", f"{result['bytes']:,} bytes"],
            ["bits per weight", f"{result['bits_per_weight']:.3f}"],
        ]
        console.print(table("", "", rows=rows))
        console.print(f"try: polymask predict {self.name} IMAGE --library {self.out}", style="dim")

    def _train(self, recipe: Recipe, pack: Path, work: Path, checkpoint: Path) -> None:
        from polymask.data import load_data
        from polymask.learning import learn
        from polymask.pack import remove_leftovers

        data = load_data(self.data, seed=self.seed, limit=self.limit)
        base = self.open_base(self.base)
        sizes = ", ".join(f"{len(split):,} {part}" for part, split in data.splits().items())
        self.say(
            f"[bold]{self.name}[/]: {len(data.classes)} classes, {sizes} images\n"
            f"base {base.name}, method {self.method}, recipe {recipe.name} ({recipe.epochs} epochs "
            f"at {recipe.input(base.input).side} px), seed {self.seed}, library {self.out}"
        )
        for note in data.notes:
            self.say(f"[dim]{note}[/]")
        try:
            work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PolymaskError(f"{work} cannot be made: {error.strerror}") from error
        for file in (pack, checkpoint):
            remove_leftovers(file)
        if not self.resume:
            checkpoint.unlink(missing_ok=True)
        loaders = self._loaders(data, base.input, recipe)
        learned = learn(
            base,
            data,
            self.method,
            recipe,
            loaders=loaders,
            seed=self.seed,
            checkpoint=checkpoint,
            resume=self.resume,
            listener=self._listener(recipe, work),
        )
        learned.domain.save(pack)

    def _loaders(self, data: Any, spec: Any, recipe: Recipe) -> "Loaders":
        from rich.progress import Progress

        from polymask.cli.progress import error_console
        from polymask.learning import make_loaders

        with Progress(console=error_console(), transient=True) as bar:
            task = bar.add_task("  reading images", total=None)
            loaders = make_loaders(
                data,
                spec,
                recipe,
                seed=self.seed,
                cache=self.cache,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        self.say(f"[dim]images are ready at {loaders.train.throughput(0.5):,.0f} a second[/]")
        return loaders

    def _listener(self, recipe: Recipe, work: Path) -> "Listener":
        from polymask.cli.progress import JsonLog, LiveProgress, TensorBoardLog, Together

        header = {"name": self.name, "method": self.method, "seed": self.seed, "data": self.data}
        log = JsonLog(work / "log.jsonl", header | {"recipe": recipe.to_json()})
        extra = [TensorBoardLog(work)] if self.tensorboard else []
        return Together(LiveProgress(self.name), log, *extra)

    def _changes(self) -> dict[str, Any]:
        given = {f.name: getattr(self.overrides, f.name) for f in fields(self.overrides)}
        return {name: value for name, value in given.items() if value is not None}

    def _result(self, pack: Path) -> dict[str, Any]:
        from polymask.pack import inspect

        info = inspect(pack)
        named = {"pack": str(pack), "method": info.manifest.method, "base": info.manifest.base}
        return named | {"bytes": info.bytes} | info.manifest.metrics


@dataclass(kw_only=True)
class Demo(Verb):
    """Teach one network three domains, prove that nothing is forgotten, and write a report."""

    out: Path = Path("demo")
    """Where the packs and the report go."""
    seed: int = 0
    """Rules everything random."""

    def run(self) -> dict[str, Any]:
        from polymask.cli.progress import LiveBar, error_console
        from polymask.demo import headline, run_demo

        console = error_console()
        command = f"polymask demo --seed {self.seed}"
        result = run_demo(self.out, self.seed, console, lambda t: LiveBar(t, console), command)
        return headline(result, self.out / "report.html")

    def present(self, result: dict[str, Any], console: "Console") -> None:
        rows = [
            [
                name,
                *(f"{m['test_accuracy']:.2f} %" for m in methods.values()),
                f"{methods['affine-full']['bytes'] / 1e6:.2f} MB",
            ]
            for name, methods in result["domains"].items()
        ]
        methods = next(iter(result["domains"].values()))
        console.print()
        console.print(table("test accuracy", *methods, "pack", rows=rows))
        kept = result["nothing_forgotten"]
        console.print(
            "[green]✓[/] nothing was forgotten: the base and every domain's outputs are "
            "bit-identical to what they were"
            if kept
            else "[bold red]✗ something changed: see the report[/]"
        )
        console.print(f"{result['seconds']:.0f} s · look at [bold]{result['report']}[/]")
