"""A training run's epochs in a file, one JSON line each, as they come."""

import json
from pathlib import Path
from typing import IO, Any

from polymask.train.fit import Listener
from polymask.train.recipe import Recipe
from polymask.train.state import EpochRecord


class EpochLog(Listener):
    """One JSON line for every epoch, after what is in the file already."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path, self.header = path, header
        self.file: IO[str] | None = None

    def begin(self, recipe: Recipe, steps: int, epoch: int) -> None:
        self.file = self.path.open("a")
        self._write({"event": "begin", "epoch": epoch, "steps": steps} | self.header)

    def epoch(self, record: EpochRecord, seconds: float) -> None:
        numbers = {
            "epoch": record.epoch,
            "loss": record.loss,
            "train_accuracy": record.train_accuracy,
            "val_accuracy": record.val_accuracy,
        }
        self._write({"event": "epoch", "seconds": round(seconds, 3)} | numbers)

    def end(self) -> None:
        if self.file is not None:
            self.file.close()

    def _write(self, line: dict[str, Any]) -> None:
        assert self.file is not None
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
