"""The verb that makes a base: pretrain."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from polymask.cli.overrides import given, recipe_overrides
from polymask.cli.training import Places, TrainingVerb
from polymask.cli.verb import table
from polymask.train.recipe import Recipe, get_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from polymask.data.images import DomainData

_FOR_DOMAINS = (
    "name",
    "weight_rate",
    "head_optimiser",
    "head_rate",
    "head_momentum",
    "norms",
    "norm_momentum",
    "norm_reestimate",
)
PretrainOverrides: Any = recipe_overrides("PretrainOverrides", without=_FOR_DOMAINS)


@dataclass(kw_only=True)
class Pretrain(TrainingVerb):
    """Train a whole network from random weights on a folder of images, and write it as a base."""

    net: tyro.conf.Positional[str]
    """A built-in network, such as decathlon-wrn28; timm:NAME or torchvision:NAME."""
    out: Path
    """The base's file, FILE.safetensors: what --base takes afterwards."""
    recipe: str = "pretrain"
    """pretrain (the decathlon's: SGD 0.1, 120 epochs), another recipe's name, or a .toml file."""
    device: str = "cpu"
    """Where to compute."""
    overrides: PretrainOverrides = field(default_factory=PretrainOverrides)

    def target(self) -> Path:
        from polymask.nets.base_file import check_path

        check_path(self.out)
        return self.out

    def chosen_recipe(self) -> Recipe:
        return get_recipe(self.recipe, **given(self.overrides))

    def train(self, recipe: Recipe, data: "DomainData", places: Places) -> None:
        from polymask.nets.zoo import build
        from polymask.train.pretrain import pretrain

        _, spec = build(self.net, pretrained=False, device="meta")
        self.announce(
            self.net,
            data,
            f"recipe {recipe.name} ({recipe.epochs} epochs at {recipe.input(spec).side} px), seed "
            f"{self.seed}, file {self.out}",
        )
        self.prepare(places)
        trained = pretrain(
            self.net,
            data,
            recipe,
            loaders=self.loaders(data, spec, recipe),
            seed=self.seed,
            device=self.device,
            checkpoint=places.checkpoint,
            resume=self.resume,
            listener=self.listener(self.net, {}, recipe, places),
        )
        trained.save(places.result)

    def result(self, target: Path) -> dict[str, Any]:
        from polymask.core.base import load_base
        from polymask.nets.base_file import read_notes

        notes = read_notes(target)
        named = {"base": str(target), "net": notes.net, "class_count": len(notes.classes)}
        named |= {"fingerprint": load_base(target).fingerprint}
        return named | {"bytes": target.stat().st_size} | notes.metrics

    def present(self, result: dict[str, Any], console: "Console") -> None:
        accuracies = {name: result[f"{name}_accuracy"] for name in ("val", "test")}
        rows = [
            ["base", result["base"]],
            *([f"{name} accuracy", "–" if value is None else f"{value:.2f} %"] for name, value in accuracies.items()),
            ["size", f"{result['bytes']:,} bytes"],
            ["fingerprint", result["fingerprint"][:12]],
        ]
        console.print(table("", "", rows=rows))
        console.print(f"try: polymask learn NAME --data FOLDER --base {self.out}", style="dim")
