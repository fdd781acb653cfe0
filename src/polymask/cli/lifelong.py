"""Verbs that change a domain that is there already: calibrate."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polymask.cli.verb import NamedPack, PackVerb, check_seed, size_text, table
from polymask.errors import DataError, DomainError
from polymask.files import locked

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True)
class ChangeVerb(NamedPack):
    """A command that writes a pack again."""

    def own_path(self) -> Path:
        """The pack's file, which must be one's own to write."""
        from polymask.pack.hub import is_hub_name

        if is_hub_name(self.pack):
            raise DomainError(f"{self.pack} is on the Hub and is not changed there; copy it into a library first")
        return self.pack_path()


@dataclass(kw_only=True)
class CalibrateVerb(ChangeVerb, PackVerb):
    """Give a pack what it needs to call an image unknown, and probabilities that fit; without training."""

    data: str
    """Images of the domain's classes: the folder that it was learned from, or another source."""
    rule: Literal["softmax", "energy", "mahalanobis", "neighbours"] = "mahalanobis"
    """What scores an image: softmax, energy, mahalanobis or neighbours."""
    accepted: float = 0.95
    """The share of validation images that stay known."""
    seed: int | None = None
    """The seed that split the source; by default the one that the pack was learned with."""

    def needs(self) -> list[str]:
        return ["PIL"]

    def run(self) -> dict[str, Any]:
        from polymask.train.unknown import calibrate

        if self.seed is not None:
            check_seed(self.seed)
        if not 0 < self.accepted < 1:
            raise DataError(f"--accepted {self.accepted} must be between 0 and 1")
        path = self.own_path()
        with locked(path):
            base, domain = self.open_domain()
            learned_with = domain.recipe.get("seed")
            seed = self.seed if self.seed is not None else learned_with if isinstance(learned_with, int) else 0
            found = calibrate(base, domain, self.data, rule=self.rule, accepted=self.accepted, seed=seed)
            domain.save(path)
        return {"pack": str(path)} | found.to_json()

    def present(self, result: dict[str, Any], console: "Console") -> None:
        rows = [
            ["pack", result["pack"]],
            ["rule", result["rule"]],
            ["known", f"{result['accepted']:.1f} % of {result['images']:,} validation images"],
            ["temperature", f"{result['temperature']:.3f}"],
            ["calibration error", f"{result['error_before']:.2f} % before, {result['error_after']:.2f} % at it"],
            ["kept", size_text(result["bytes"])],
        ]
        console.print(table("", "", rows=rows))
        console.print(f"try: polymask predict {self.pack} IMAGE --reject --library {self.library}", style="dim")
