"""What verbs have that train from images to a file: a work folder, checkpoints, progress, a log."""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polymask.cli.verb import Verb
from polymask.errors import DomainError, PolymaskError
from polymask.train.recipe import Recipe

if TYPE_CHECKING:
    from polymask.core.input import InputSpec
    from polymask.data.images import DomainData
    from polymask.train.fit import Listener
    from polymask.train.learn import Loaders
    from polymask.train.ranks import Ranks


@dataclass(frozen=True)
class Places:
    """Where a training keeps what: its result, and its work folder beside it."""

    result: Path

    @property
    def work(self) -> Path:
        """The folder of the log and the checkpoint."""
        return self.result.with_suffix(".run")

    @property
    def checkpoint(self) -> Path:
        """What an interrupted run goes on from; gone when it is done."""
        return self.work / "checkpoint.safetensors"

    @property
    def log(self) -> Path:
        """One JSON line for every epoch."""
        return self.work / "log.jsonl"


@dataclass(kw_only=True)
class TrainingVerb(Verb):
    """A command that trains on images and writes one file."""

    data: str
    """A folder (train/ val/ test/ of class folders, or class folders alone), decathlon:ROOT/NAME,
    sketch:ROOT/SET, torchvision:NAME, hf:NAME, or digits, letters, solar-cells."""
    seed: int = 0
    """Rules the cut of the data, the start and the order of the images."""
    limit: int | None = None
    """At most so many training images."""
    cache: Path | None = None
    """A folder that keeps decoded images for the next run."""
    resume: bool = False
    """Go on where an interrupted run stopped."""
    force: bool = False
    """Replace the file of an earlier run."""
    tensorboard: bool = False
    """Write TensorBoard events beside the log."""

    def __post_init__(self) -> None:
        self.ranks: Ranks | None = None  # the processes that do this together, if several do

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes files and talks."""
        return self.ranks is None or self.ranks.first

    def say(self, message: str) -> None:
        if self.leads:
            super().say(message)

    @abstractmethod
    def target(self) -> Path:
        """The file to write, once its name is known to be good."""

    @abstractmethod
    def chosen_recipe(self) -> Recipe:
        """The recipe, with the fields that the options change."""

    @abstractmethod
    def train(self, recipe: Recipe, data: "DomainData", places: Places) -> None:
        """Train and write the file."""

    @abstractmethod
    def result(self, target: Path) -> dict[str, Any]:
        """What the file says of itself."""

    def run(self) -> dict[str, Any]:
        from polymask.core.allocation import keep_freed_memory
        from polymask.data.load import load_data

        keep_freed_memory()
        target = self.target()
        places = Places(target)
        if target.exists() and not self.force:
            if not self.resume:
                raise DomainError(f"{target} exists; choose another name, or --force to replace it")
            if not places.checkpoint.exists():
                self.say(f"{target} is there already: nothing to resume")
                return self.result(target)
        recipe = self.chosen_recipe()
        data = load_data(self.data, seed=self.seed, limit=self.limit)
        self.train(recipe, data, places)
        if not self.leads:
            return {}
        places.checkpoint.unlink(missing_ok=True)
        return self.result(target)

    def announce(self, title: str, data: "DomainData", choices: str) -> None:
        """Say what will be trained on which images."""
        sizes = ", ".join(f"{len(split):,} {part}" for part, split in data.splits().items())
        self.say(f"[bold]{title}[/]: {len(data.classes)} classes, {sizes} images\n{choices}")
        for note in data.notes:
            self.say(f"[dim]{note}[/]")

    def prepare(self, places: Places) -> None:
        """Make the work folder, and clear away what a run that was killed has left."""
        from polymask.pack.format import remove_leftovers

        if not self.leads:
            return
        try:
            places.work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PolymaskError(f"{places.work} cannot be made: {error.strerror}") from error
        for file in (places.result, places.checkpoint):
            remove_leftovers(file)
        if not self.resume:
            for file in (places.checkpoint, places.log):
                file.unlink(missing_ok=True)

    def loaders(self, data: "DomainData", spec: "InputSpec", recipe: Recipe) -> "Loaders":
        """The batches, made while a bar shows how many images have been read."""
        from rich.progress import Progress

        from polymask.cli.progress import error_console
        from polymask.train.learn import make_loaders

        with Progress(console=error_console(), transient=True, disable=not self.leads) as bar:
            task = bar.add_task("  reading images", total=None)
            loaders = make_loaders(
                data,
                spec,
                recipe,
                seed=self.seed,
                cache=self.cache,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        if self.leads:
            self.say(f"[dim]images are ready at {loaders.train.throughput(0.5):,.0f} a second[/]")
        return loaders

    def listener(self, title: str, what: dict[str, Any], recipe: Recipe, places: Places) -> "Listener":
        """A bar, a line for every epoch, and the log; `what` stands in the log's first line."""
        from polymask.cli.progress import LiveProgress, TensorBoardLog
        from polymask.train.fit import Listener, Together
        from polymask.train.log import EpochLog

        if not self.leads:
            return Listener()
        header = {"name": title} | what | {"seed": self.seed, "data": self.data}
        log = EpochLog(places.log, header | {"recipe": recipe.to_json()})
        extra = [TensorBoardLog(places.work)] if self.tensorboard else []
        return Together(LiveProgress(title), log, *extra)
