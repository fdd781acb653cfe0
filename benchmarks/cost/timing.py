"""Time several things in one run, in turn, so that a disturbance affects all of them."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Calls = dict[str, Callable[[], object]]


class Clock:
    """CPU seconds of one thread, which other programs disturb least; of several, or of another device, wall time.

    What the timed code makes, it makes on this device from now on.
    """

    def __init__(self, threads: int, device: str = "cpu") -> None:
        torch.set_num_threads(threads)
        torch.set_default_device(device)
        self.device = torch.device(device)
        self.by_cpu = threads == 1 and self.device.type == "cpu"
        self.name = "CPU seconds" if self.by_cpu else "wall-clock seconds"

    def now(self) -> float:
        """The time when all that was asked of the device is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.process_time() if self.by_cpu else time.perf_counter()

    def interleaved(self, calls: Calls, rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
        """Seconds of each call in each round, in a new random order every round."""
        order, seconds = list(calls), {name: [] for name in calls}
        lots = random.Random(0)
        for turn in range(warm_up + rounds):
            lots.shuffle(order)
            for name in order:
                begin = self.now()
                calls[name]()
                taken = self.now() - begin
                if turn >= warm_up:
                    seconds[name].append(taken)
        return seconds


def ratios(seconds: dict[str, list[float]], unit: str) -> dict[str, dict[str, Any]]:
    """For each call the median of its ratios to `unit`, round by round, and their quartiles."""
    found = {}
    for name, taken in seconds.items():
        each = [a / b for a, b in zip(taken, seconds[unit], strict=True)]
        low, middle, high = statistics.quantiles(each, n=4)
        found[name] = {
            "median": round(middle, 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "seconds": round(statistics.median(taken), 5),
        }
    return found


def markdown(rows: list[list[str]]) -> str:
    """A table; the first row is its heading."""
    first, *rest = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [first, ["---"] * len(first), *rest])


def spread(row: dict[str, Any]) -> str:
    """A ratio with its quartiles."""
    low, high = row["quartiles"]
    return f"{row['median']:.2f} ({low:.2f}–{high:.2f})"
