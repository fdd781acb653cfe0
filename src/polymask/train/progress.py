"""How training goes, live on standard error: in terminals and notebooks."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from polymask.core.target import CLASSES, Target
from polymask.train.fit import Listener
from polymask.train.learner import EpochRecord
from polymask.train.recipe import Recipe

_TITLE = 14  # characters: the bar and all that is beside it fit into 80 columns


class LiveBar(Listener):
    """One bar for the whole training; it leaves no trace."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.title, self.console = title, console or Console(stderr=True, highlight=False)
        self.bar: Progress | None = None
        self.density: float | None = None

    def begin(self, recipe: Recipe, steps: int, epoch: int) -> None:
        self.epochs, self.steps, self.images = recipe.epochs, steps, 0
        self.began = time.perf_counter()
        if self.console.is_jupyter and find_spec("ipywidgets") is None:
            return  # rich cannot draw a bar there
        self.bar = Progress(
            TextColumn("  {task.description}", markup=False),
            BarColumn(10),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
        )
        total = recipe.epochs * steps
        title = self.title if len(self.title) <= _TITLE else f"{self.title[: _TITLE - 1]}…"
        self.task: TaskID = self.bar.add_task(title, total=total, completed=epoch * steps, note="")
        self.bar.start()

    def step(self, epoch: int, step: int, loss: float, images: int, density: float | None) -> None:
        self.density = self.density if density is None else density
        if self.bar is None:
            return
        self.images += images
        rate = self.images / (time.perf_counter() - self.began)
        note = f"epoch {epoch + 1}/{self.epochs} · loss {loss:.3f} · {rate:.0f} images/s"
        self.bar.update(self.task, completed=epoch * self.steps + step, note=note)

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()


class LiveProgress(LiveBar):
    """The bar, and one line for every epoch that is done, with what `target` is measured by."""

    def __init__(self, title: str, console: Console | None = None, target: Target = CLASSES) -> None:
        super().__init__(title, console)
        self.target = target

    def epoch(self, record: EpochRecord, seconds: float) -> None:
        val = "" if record.val_accuracy is None else f"  val {self.target.text(record.val_accuracy, width=6)}"
        ones = "" if self.density is None else f"  {100 * self.density:3.0f} % ones"
        self.console.print(
            f"  epoch {record.epoch + 1:2d}/{self.epochs}  loss {record.loss:6.3f}  "
            f"train {self.target.text(record.train_accuracy, width=6)}{val}{ones}  {seconds:.1f} s",
            soft_wrap=True,
            markup=False,
        )

    def stopped(self, why: str) -> None:
        self.console.print(f"  {why}", soft_wrap=True, markup=False)

    def fed(self, way: str, value: float) -> None:
        self.console.print(f"  fed at {way}: val {self.target.text(value)}", soft_wrap=True, markup=False)


@contextmanager
def reading_bar(*, disable: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar for as long as images are read, moved by calls with the images done and the images in all."""
    console = Console(stderr=True, highlight=False)
    disable = disable or (console.is_jupyter and find_spec("ipywidgets") is None)
    with Progress(console=console, transient=True, disable=disable) as bar:
        task = bar.add_task("  reading images", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
