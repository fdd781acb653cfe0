"""Verbs that change a domain that is there already: calibrate, extend, rollback, bake, remove."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polymask.cli.verb import NamedPack, PackVerb, check_seed, measured_text, size_text, table
from polymask.errors import DataError, DomainError
from polymask.files import exemplars_path, locked
from polymask.train.recipe import split_seed

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
        path = self.pack_path()
        if path.suffix == ".version":
            raise DomainError(f"{self.pack} is a version that was kept, and stays as it is; name the domain itself")
        return path


@dataclass(kw_only=True)
class CalibrateVerb(ChangeVerb, PackVerb):
    """Give a pack what it needs to call an image unknown, and probabilities that fit; without training."""

    data: str
    """Images of the domain's classes: the folder that it was learned from, or another source."""
    rule: Literal["cosine", "softmax", "energy", "mahalanobis", "neighbours"] | None = None
    """What scores an image; by default cosine, or softmax where there are no training images."""
    accepted: float = 0.95
    """The share of validation images that stay known."""
    seed: int | None = None
    """The seed that split the source; by default the one of the pack's images."""

    def needs(self) -> list[str]:
        return ["PIL"]

    def run(self) -> dict[str, Any]:
        from polymask.library.versions import keep_version
        from polymask.train.unknown import calibrate

        if not 0 < self.accepted < 1:
            raise DataError(f"--accepted {self.accepted} must be between 0 and 1")
        path = self.own_path()
        with locked(path):
            base, domain = self.open_domain()
            seed = split_seed(domain.recipe) if self.seed is None else self.seed
            check_seed(seed)
            found = calibrate(base, domain, self.data, rule=self.rule, accepted=self.accepted, seed=seed)
            keep_version(path)
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


@dataclass(kw_only=True)
class ExtendVerb(ChangeVerb, PackVerb):
    """Add classes to a domain without its old images; the pack before stays as a version."""

    data: str
    """Images of the new classes alone: a folder, or another source (see the documentation of `learn`)."""
    way: Literal["head", "norms", "mask"] = "head"
    """What learns: head (old logits stay the same to the bit), norms too, or mask: all that the domain learned."""
    recipe: str = "standard"
    """How the ways norms and mask train: a recipe's name, or a .toml file."""
    epochs: int | None = None
    """Epochs, where they are not the recipe's."""
    seed: int = 0
    """Seeds the split of the data and the order of the images."""
    limit: int | None = None
    """The most training images to use."""

    def needs(self) -> list[str]:
        return ["PIL"]

    def run(self) -> dict[str, Any]:
        from polymask.data.load import load_data
        from polymask.library.versions import current_version, keep_version
        from polymask.lifelong.exemplars import read_exemplars, with_exemplars_of
        from polymask.lifelong.extend import check_extends, extend
        from polymask.train.progress import LiveProgress
        from polymask.train.recipe import get_recipe

        check_seed(self.seed)
        recipe = get_recipe(self.recipe, **({} if self.epochs is None else {"epochs": self.epochs}))
        path = self.own_path()
        with locked(path):
            data = load_data(self.data, seed=self.seed, limit=self.limit, fewest=1)
            base, domain = self.open_domain()
            check_extends(base, domain, data, self.way)
            exemplars = read_exemplars(path, domain)
            self.say(f"{path}: {len(domain.classes or [])} classes, and {len(data.classes)} from {self.data}")
            if domain.unknown is None and exemplars is None:
                self.say(
                    f"nothing stands for the old classes' images; polymask calibrate {self.pack} on images of them "
                    "before, or learn with --keep-exemplars, keeps new classes from taking theirs",
                    style="yellow",
                )
            listener = None if self.way == "head" else LiveProgress(str(self.pack), target=data.target)
            how: dict[str, Any] = {"way": self.way, "recipe": recipe, "seed": self.seed, "listener": listener}
            found = extend(base, domain, data, exemplars=exemplars, **how)
            before = keep_version(path)
            if exemplars is not None:
                with_exemplars_of(path, base, found.domain, exemplars, data)
            found.domain.save(path)
            kept = exemplars_path(path).stat().st_size if exemplars is not None else 0
        if domain.unknown is not None and self.way != "head":
            self.say(f"features have changed: polymask calibrate {self.pack} on images of all classes where you can")
        about = {"pack": str(path), "version": current_version(path), "version_before": before}
        return about | found.notes | {"bytes": path.stat().st_size, "exemplar_bytes": kept}

    def present(self, result: dict[str, Any], console: "Console") -> None:
        rows = [
            ["pack", result["pack"]],
            ["classes", f"{result['old_classes'] + result['new_classes']}, {result['new_classes']} of them new"],
            ["accuracy on new classes", measured_text("accuracy", result["new_test_accuracy"])],
            ["size", size_text(result["bytes"])],
            ["version", f"{result['version']}; {self.pack}@{result['version_before']} is the one before"],
        ]
        console.print(table("", "", rows=rows))
        console.print(f"back: polymask rollback {self.pack} --library {self.library}", style="dim")


@dataclass(kw_only=True)
class RollbackVerb(ChangeVerb):
    """Bring back a version of a pack, by default the one before; what it is now stays as a version."""

    to: int | None = None
    """The number of the version."""

    def run(self) -> dict[str, Any]:
        from polymask.library.versions import rollback, versions_of

        path = self.own_path()
        before, now = rollback(path, self.to)
        return {"pack": str(path), "version_before": before, "version": now, "versions": list(versions_of(path))}

    def present(self, result: dict[str, Any], console: "Console") -> None:
        kept = ", ".join(map(str, result["versions"]))
        now, before = result["version"], result["version_before"]
        console.print(f"{result['pack']} is version {now} again; it was version {before}. Kept: {kept}", soft_wrap=True)


@dataclass(kw_only=True)
class BakeVerb(ChangeVerb, PackVerb):
    """Let a pack hold the masks of other packs that it draws on, so that it stands alone."""

    def run(self) -> dict[str, Any]:
        from polymask.library.versions import keep_version
        from polymask.lifelong.cross import bake

        path = self.own_path()
        with locked(path):
            _, domain = self.open_domain()
            before, sources = path.stat().st_size, [name for name, _ in domain.method.needs]
            baked = bake(domain)
            keep_version(path)
            baked.save(path)
        return {"pack": str(path), "sources": sources, "bytes_before": before, "bytes": path.stat().st_size}

    def present(self, result: dict[str, Any], console: "Console") -> None:
        held = ", ".join(result["sources"])
        sizes = f"{size_text(result['bytes_before'])} before, {size_text(result['bytes'])} now"
        console.print(f"{result['pack']} holds the masks of {held}: {sizes}", soft_wrap=True)


@dataclass(kw_only=True)
class RemoveVerb(ChangeVerb):
    """Remove a domain's pack, versions and exemplars; refused where others draw on its masks."""

    force: bool = False
    """Remove it though others draw on it, and say which ones that breaks."""

    def run(self) -> dict[str, Any]:
        from polymask.lifelong.removal import remove_pack
        from polymask.pack.sources import drawing_on

        path = self.own_path()
        if not path.is_file():
            raise DomainError(f"there is no pack {path}")
        with locked(path):
            users = drawing_on(path)
            if users and not self.force:
                raise DomainError(
                    f"{', '.join(users)} draw on the masks of {self.pack}; polymask bake them first, or --force to "
                    "break them"
                )
            remove_pack(path)
        return {"pack": str(path), "broken": users}

    def present(self, result: dict[str, Any], console: "Console") -> None:
        console.print(f"removed {result['pack']}", soft_wrap=True)
        if result["broken"]:
            console.print(f"{', '.join(result['broken'])} drew on it and cannot be loaded now", soft_wrap=True)
