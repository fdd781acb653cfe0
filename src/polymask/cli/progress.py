"""Where people wait for a benchmark: live on standard error. And what TensorBoard is told of a training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polymask.benchmarks.jobs import Job
from polymask.benchmarks.local import Watcher
from polymask.benchmarks.records import ARROWS, Outcome, Plan
from polymask.cli.verb import error_console, number_text
from polymask.train.fit import Listener
from polymask.train.learner import EpochRecord


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


@dataclass
class _Cell:
    """One method on one domain: how far its jobs are."""

    waiting: int = 0
    running: float | None = None  # the share that is done
    failed: bool = False
    accuracies: list[float] | None = None

    def text(self) -> Text:
        """What the table shows."""
        if self.failed:
            return Text("failed", style="bold red")
        mean = f"{fmean(self.accuracies):.1f}" if self.accuracies else ""
        if self.running is not None:
            return Text(f"{mean} {100 * self.running:.0f} %".strip(), style="cyan")
        if self.waiting:
            return Text(f"{mean} ·".strip(), style="dim")
        return Text(mean or "–")


class LiveTable(Watcher):
    """The table where there is a terminal, else a line for every job."""

    def __init__(self, plan: Plan, jobs: Sequence[Job], console: Console | None = None) -> None:
        self.plan, self.jobs = plan, jobs
        self.console = console or error_console()
        self.cells: dict[tuple[str, str], _Cell] = {}
        self.done, self.notes = 0, {}  # type: int, dict[Job, str]
        for job in jobs:
            for name, _ in job.domains:
                self._cell(job, name).waiting += 1
        self.live = Live(console=self.console, refresh_per_second=4, get_renderable=self.picture, transient=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live.is_started:
            self.live.stop()

    def started(self, job: Job) -> None:
        self.progressed(job, 0.0, "reading images")

    def progressed(self, job: Job, share: float, note: str) -> None:
        self.notes[job] = note
        for name, _ in job.domains:
            self._cell(job, name).running = share

    def finished(self, job: Job, outcome: Outcome) -> None:
        self._close(job)
        for name, found in outcome.domains.items():
            if found.test_accuracy is not None:
                cell = self._cell(job, name)
                cell.accuracies = [*(cell.accuracies or []), found.test_accuracy]
        self._line(
            job, ", ".join(f"{name} {number_text(d.test_accuracy, unit=' %')}" for name, d in outcome.domains.items())
        )

    def failed(self, job: Job, error: str) -> None:
        self._close(job)
        for name, _ in job.domains:
            self._cell(job, name).failed = True
        self._line(job, f"failed: {error}")

    def picture(self) -> Group:
        """The table as it stands."""
        grid = Table(box=None, pad_edge=False, header_style="bold")
        grid.add_column("test accuracy, %")
        for domain in self.plan.domains:
            grid.add_column(domain, justify="right")
        for label in dict.fromkeys(label for label, _ in self.cells):
            cells = [self.cells.get((label, domain), _Cell()).text() for domain in self.plan.domains]
            grid.add_row(label, *cells)
        lines = [Text(f"{job.title} · {note}", style="dim") for job, note in self.notes.items()]
        return Group(grid, Text(f"{self.done} of {len(self.jobs)} jobs", style="dim"), *lines)

    def _cell(self, job: Job, domain: str) -> _Cell:
        return self.cells.setdefault((f"{job.method}{ARROWS[job.direction]}", domain), _Cell())

    def _close(self, job: Job) -> None:
        self.done += 1
        self.notes.pop(job, None)
        for name, _ in job.domains:
            cell = self._cell(job, name)
            cell.waiting, cell.running = cell.waiting - 1, None

    def _line(self, job: Job, what: str) -> None:
        if not self.live.is_started:
            self.console.print(f"{self.done}/{len(self.jobs)} {job.title}: {what}", soft_wrap=True)
