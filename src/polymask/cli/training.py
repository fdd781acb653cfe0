"""What the verbs that train have in common: one file that is written, and a work folder beside it."""

from abc import abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polymask.cli.verb import ImagesVerb
from polymask.errors import TrainingError
from polymask.files import locked
from polymask.train.recipe import Recipe

if TYPE_CHECKING:
    from polymask.core.input import InputSpec
    from polymask.data.images import DomainData


@dataclass(kw_only=True)
class TrainingVerb(ImagesVerb):
    """A command that trains on images and writes one file; a work folder beside it has log and checkpoint."""

    data: str
    """A folder (train/ val/ test/ of class folders, class folders alone, or images with labels.csv), a .csv file,
    decathlon:ROOT/NAME, sketch:ROOT/SET, torchvision:NAME, hf:NAME, or digits, letters, solar-cells."""
    resume: bool = False
    """Go on where an interrupted run stopped, and do nothing where it is done. Going on is the default."""
    fresh: bool = False
    """Start over, though an interrupted run could go on."""
    tensorboard: bool = False
    """Write TensorBoard events beside the log."""

    @abstractmethod
    def out_file(self) -> Path:
        """The file to write, once its name is known to be good."""

    def warn_of(self, target: Path) -> None:
        """Say what else would change with the file that is replaced, if anything would."""

    @abstractmethod
    def chosen_recipe(self) -> Recipe:
        """The recipe, with the fields that the options change."""

    @abstractmethod
    def train(self, recipe: Recipe, data: "DomainData") -> None:
        """Train and write the file."""

    @abstractmethod
    def result(self, target: Path) -> dict[str, Any]:
        """What the file says of itself."""

    @property
    def checkpoint(self) -> Path:
        """What an interrupted run goes on from; gone when it is done."""
        return self.out_file().with_suffix(".run") / "checkpoint.safetensors"

    @property
    def goes_on(self) -> bool:
        """Whether an interrupted run is gone on with."""
        return not self.fresh and self.checkpoint.exists()

    def needs(self) -> list[str]:
        return super().needs() + (["tensorboard"] if self.tensorboard else [])

    def say(self, message: str, style: str | None = None) -> None:
        if self.leads:
            super().say(message, style)

    def run(self) -> dict[str, Any]:
        from polymask.core.merge import keep_freed_memory

        keep_freed_memory()
        target = self.out_file()
        if self.resume and self.fresh:
            raise TrainingError("--resume goes on and --fresh starts over; give one of them")
        self.check_settings(target.parent)
        with locked(target) if self.leads else nullcontext():
            if self.resume and not self.force and target.exists() and not self.goes_on:
                self.say(f"{target} is there already: nothing to resume")
                return self.result(target)
            if not (self.resume and self.goes_on):
                self.check_free(target)
            self.warn_of(target)
            recipe = self.chosen_recipe()
            self.train(recipe, self.load_images())
            if not self.leads:
                return {}
            self.remove_checkpoints()
            return self.result(target)

    def remove_checkpoints(self) -> None:
        """Delete what an interrupted run would go on from."""
        for file in self.checkpoint.parent.glob(f"*{self.checkpoint.name}"):
            file.unlink()

    def load_images(self) -> "DomainData":
        """Find the images."""
        from polymask.data.load import load_data

        return load_data(self.data, seed=self.seed, limit=self.limit)

    def announce(self, title: str, data: "DomainData", choices: str) -> None:
        """Say what will be trained on which images."""
        sizes = ", ".join(f"{len(split):,} {part}" for part, split in data.splits().items())
        self.say(f"{title}: {len(data.classes)} {data.target.kind}, {sizes} images\n{choices}")
        for note in data.notes:
            self.say(note, style="dim")

    def check_run(self, recipe: Recipe, identity: dict[str, Any]) -> None:
        """Where an interrupted run is gone on with: raise if it had other settings, else say where it stands."""
        from polymask.train.state import read_state_of

        if not self.goes_on:
            return
        state = read_state_of(self.checkpoint, identity)
        epoch = len(state["history"]) + 1
        self.say(f"goes on from epoch {min(epoch, recipe.epochs)} of {recipe.epochs}; --fresh starts over")

    def prepare(self, data: "DomainData", spec: "InputSpec", recipe: Recipe, **header: str) -> dict[str, Any]:
        """Make the work folder, read the images and start the log with `header`: what a training is given."""
        from polymask.cli.progress import TensorBoardLog
        from polymask.train.fit import EpochLog, Listener, Together
        from polymask.train.progress import LiveProgress

        work = self.checkpoint.parent
        log, goes_on = work / "log.jsonl", self.goes_on  # a line for every epoch
        if self.leads:
            self.make_folder(work)
            if not goes_on:
                for name in ("log.jsonl", "plan.json", "evaluation.json", "report.html"):
                    (work / name).unlink(missing_ok=True)
                self.remove_checkpoints()
        loaders = self.loaders(data, spec, recipe)
        listener = Listener()
        if self.leads:
            self.say(f"images are ready at {loaders.train.throughput(0.5):,.0f} a second", style="dim")
            notes = {**header, "seed": self.seed, "data": self.data, "recipe": recipe.to_json()}
            extra = [TensorBoardLog(work)] if self.tensorboard else []
            listener = Together(LiveProgress(header["name"], target=data.target), EpochLog(log, notes), *extra)
        options = {"loaders": loaders, "seed": self.seed, "listener": listener}
        return options | {"checkpoint": self.checkpoint, "resume": goes_on}
