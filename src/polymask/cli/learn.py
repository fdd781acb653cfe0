"""Verbs that train: learn, demo."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import tyro

from polymask.cli.overrides import given, recipe_overrides
from polymask.cli.training import Places, TrainingVerb
from polymask.cli.verb import BaseVerb, Verb, table
from polymask.train.recipe import Recipe, get_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.data.images import DomainData

Overrides: Any = recipe_overrides("Overrides", without=("name",))


@dataclass(kw_only=True)
class Learn(TrainingVerb, BaseVerb):
    """Teach the base a domain from a folder of images, and write its pack."""

    name: tyro.conf.Positional[str]
    """The domain's name: its pack becomes LIBRARY/NAME.safetensors."""
    base: str = "efficientnet-lite0"
    """A built-in base, timm:NAME, torchvision:NAME, or a base's file."""
    method: str = "affine-full"
    """See `polymask methods`; options after colons: lora-conv:rank=4:rate=3e-3."""
    recipe: str = "quick"
    """quick, imagenet-to-sketch, decathlon, residual-adapters, or a .toml file."""
    out: Path = Path("library")
    """The library's folder."""
    sync_norms: bool = False
    """With several processes (torchrun): batch norms see the batch of all, as one process would."""
    compress_gradients: bool = False
    """With several processes: send gradients in 16 bits."""
    kernels: Literal["eager", "compiled"] | None = None
    """What computes masks; compiled is faster on large networks and needs a C++ compiler.
    The default is what POLYMASK_KERNELS says, or eager."""
    overrides: Overrides = field(default_factory=Overrides)

    in_ranks: ClassVar[bool] = True

    def execute(self) -> None:
        from polymask.train.ranks import join_ranks

        with join_ranks(device=self.device, sync_norms=self.sync_norms, compress=self.compress_gradients) as self.ranks:
            if self.leads:
                super().execute()
            else:
                self.run()

    def target(self) -> Path:
        from polymask.library.model import check_name

        check_name(self.name)
        return self.out / f"{self.name}.safetensors"

    def chosen_recipe(self) -> Recipe:
        from polymask.train.method_text import read_method

        text = read_method(self.method)
        recipe = get_recipe(text.recipe_name or self.recipe, **given(self.overrides))
        return recipe.changed(text.recipe_fields)

    def train(self, recipe: Recipe, data: "DomainData", places: Places) -> None:
        from polymask.methods.affine.kernels import set_kernels
        from polymask.train.learn import learn
        from polymask.train.method_text import method_by, read_method

        if self.kernels is not None:
            set_kernels(self.kernels)
        base = self.open_base(self.base)
        self.announce(
            self.name,
            data,
            f"base {base.name}, method {self.method}, recipe {recipe.name} ({recipe.epochs} epochs "
            f"at {recipe.input(base.input).side} px), seed {self.seed}, library {self.out}",
        )
        if self.ranks is not None:
            self.say(f"{self.ranks.title}; a step has {recipe.batch_size} images in all")
        self.prepare(places)
        text = read_method(self.method)
        learned = learn(
            base,
            data,
            method_by(recipe, text.name, **text.options),
            recipe,
            loaders=self.loaders(data, base.input, recipe),
            seed=self.seed,
            checkpoint=places.checkpoint,
            resume=self.resume,
            listener=self.listener(self.name, {"method": self.method}, recipe, places),
            ranks=self.ranks,
        )
        if self.leads:
            learned.domain.save(places.result)
            if learned.at_chance:
                self.say(
                    f"[yellow]what was learned is no better than guessing[/]: the rate of "
                    f"{recipe.rate:g} may be too high for these images; try --rate "
                    f"{recipe.rate / 5:g} --force, or more epochs"
                )

    def result(self, target: Path) -> dict[str, Any]:
        from polymask.pack.format import inspect

        info = inspect(target)
        named = {"pack": str(target), "method": info.manifest.method, "base": info.manifest.base}
        return named | {"bytes": info.bytes} | info.manifest.metrics

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


@dataclass(kw_only=True)
class Demo(Verb):
    """Teach one network three domains, prove that nothing is forgotten, and write a report."""

    out: Path = Path("demo")
    """Where the packs and the report go."""
    seed: int = 0
    """Rules everything random."""

    def run(self) -> dict[str, Any]:
        from polymask.cli.demo import headline, run_demo
        from polymask.cli.progress import LiveBar, error_console
        from polymask.core.allocation import keep_freed_memory

        keep_freed_memory()
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
            "[green]✓[/] nothing was forgotten: the base and every domain's outputs are bit-identical to what they were"
            if kept
            else "[bold red]✗ something changed: see the report[/]"
        )
        console.print(f"{result['seconds']:.0f} s · look at [bold]{result['report']}[/]")
