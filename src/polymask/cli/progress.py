"""Where people wait: training, live on standard error."""

import time
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from polymask.train.fit import Listener
from polymask.train.recipe import Recipe
from polymask.train.state import EpochRecord


def error_console() -> Console:
    """The console for everything that is not a result."""
    return Console(stderr=True, highlight=False)


class LiveBar(Listener):
    """One bar for the whole training; it leaves no trace."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.title, self.console = title, console or error_console()
        self.bar: Progress | None = None
        self.density: float | None = None

    def begin(self, recipe: Recipe, steps: int, epoch: int) -> None:
        self.epochs, self.steps, self.images = recipe.epochs, steps, 0
        self.began = time.perf_counter()
        self.bar = Progress(
            TextColumn("  {task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
        )
        total = recipe.epochs * steps
        self.task: TaskID = self.bar.add_task(self.title, total=total, completed=epoch * steps, note="")
        self.bar.start()

    def step(self, epoch: int, step: int, loss: float, images: int, density: float | None) -> None:
        assert self.bar is not None
        self.images += images
        self.density = self.density if density is None else density
        rate = self.images / (time.perf_counter() - self.began)
        ones = "" if self.density is None else f" · {100 * self.density:.0f} % ones"
        note = f"epoch {epoch + 1}/{self.epochs} · loss {loss:.3f} · {rate:.0f} images/s{ones}"
        self.bar.update(self.task, completed=epoch * self.steps + step, note=note)

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()


class LiveProgress(LiveBar):
    """The bar, and one line for every epoch that is done."""

    def epoch(self, record: EpochRecord, seconds: float) -> None:
        val = "" if record.val_accuracy is None else f"  val {record.val_accuracy:6.2f} %"
        ones = "" if self.density is None else f"  {100 * self.density:5.1f} % ones"
        self.console.print(
            f"  {self.title} epoch {record.epoch + 1:2d}/{self.epochs}  loss {record.loss:6.3f}  "
            f"train {record.train_accuracy:6.2f} %{val}{ones}  {seconds:5.1f} s"
        )


class TensorBoardLog(Listener):
    """Scalars for TensorBoard, where it is installed."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def epoch(self, record: EpochRecord, seconds: float) -> None:
        for name in ("loss", "train_accuracy", "val_accuracy"):
            value = getattr(record, name)
            if value is not None:
                self.writer.add_scalar(name, value, record.epoch)

    def end(self) -> None:
        self.writer.close()
