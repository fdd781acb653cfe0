"""Where a training run stands, and what a checkpoint keeps of it."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from polymask.bits import Bits
from polymask.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from polymask.domain import Domain
from polymask.methods import Stored
from polymask.recipes import Recipe


@dataclass(frozen=True)
class EpochRecord:
    """One epoch: mean loss and accuracies in percent. `val_accuracy` is None without val."""

    epoch: int
    loss: float
    train_accuracy: float
    val_accuracy: float | None


class Run:
    """Where a training run stands, and what a checkpoint keeps of it."""

    def __init__(self, domain: Domain, recipe: Recipe, seed: int) -> None:
        self.identity = {
            "seed": seed,
            "recipe": recipe.to_json(),
            "base": domain.fingerprint,
            "method": {"name": domain.method.name} | domain.method.options(),
            "classes": domain.classes,
        }
        self.epoch = self.step = 0
        self.loss = 0.0
        self.right = self.seen = 0
        self.history: list[EpochRecord] = []
        self.best: dict[str, Stored] | None = None
        self.best_accuracy = -1.0
        self.began = time.perf_counter()

    def add(self, loss: float, right: float, count: int) -> None:
        """Count one step: its mean loss, and how many of `count` images were right."""
        self.loss += loss * count
        self.right += int(right)
        self.seen += count

    def finish_epoch(self, domain: Domain, accuracy: float | None, recipe: Recipe) -> None:
        """Close the epoch, and keep the domain if it is the best so far."""
        record = EpochRecord(
            self.epoch, self.loss / self.seen, 100 * self.right / self.seen, accuracy
        )
        self.history.append(record)
        if recipe.selection == "best" and accuracy is not None and accuracy > self.best_accuracy:
            self.best, self.best_accuracy = copied(domain.stored()), accuracy
        self.epoch, self.step = self.epoch + 1, 0
        self.loss, self.right, self.seen = 0.0, 0, 0

    def save(self, path: Path, domain: Domain, optimisers: dict[str, Optimizer]) -> None:
        """Write all that is needed to go on from here."""
        best = {
            name: {"words": t.words, "shape": list(t.shape)} if isinstance(t, Bits) else t
            for name, t in (self.best or {}).items()
        }
        state = {
            "identity": self.identity,
            "place": [self.epoch, self.step, self.loss, self.right, self.seen],
            "history": [asdict(record) for record in self.history],
            "best": best,
            "best_accuracy": self.best_accuracy,
            "domain": dict(domain.state_dict()),
            "optimisers": {name: o.state_dict() for name, o in optimisers.items()},
            "random": torch.get_rng_state(),
        }
        save_checkpoint(path, state)

    def load(self, path: Path, domain: Domain, optimisers: dict[str, Optimizer]) -> None:
        """Go on from a checkpoint of the same run; raise if it is of another one."""
        state = load_checkpoint(path)
        for name, value in self.identity.items():
            then = state["identity"].get(name)
            if _plain(then) != _plain(value):
                raise CheckpointError(
                    f"{path} is of a run with another {name} ({then}, now {value}); "
                    "resume with the same options, or delete it to start again"
                )
        domain.load_state_dict(state["domain"])
        for name, optimiser in optimisers.items():
            optimiser.load_state_dict(state["optimisers"][name])
        torch.set_rng_state(state["random"])
        self.epoch, self.step, self.loss, self.right, self.seen = state["place"]
        self.history = [EpochRecord(**record) for record in state["history"]]
        self.best_accuracy = state["best_accuracy"]
        self.best = {
            name: Bits(t["words"], tuple(t["shape"])) if isinstance(t, dict) else t
            for name, t in state["best"].items()
        } or None


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def copied(stored: dict[str, Stored]) -> dict[str, Stored]:
    """Stored tensors that training on will not change; bits never do."""
    return {n: t if isinstance(t, Bits) else t.clone() for n, t in stored.items()}
