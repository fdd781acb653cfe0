"""Where a training run stands, and the file that keeps it.

A training run's state in a file: tensors in safetensors, the rest as JSON beside them.

A state is a tree of dicts and lists whose leaves are tensors, numbers, strings, booleans and None.
It is written to a temporary file, then renamed; reading it never unpickles.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from polymask.core.bits import Bits
from polymask.core.domain import Domain
from polymask.core.parts import Stored
from polymask.errors import PolymaskError
from polymask.files import write_atomically
from polymask.train.learner import EpochRecord, Learner, Step
from polymask.train.recipe import Recipe

_KEY = "polymask-checkpoint"


class CheckpointError(PolymaskError):
    """A checkpoint is damaged, or belongs to another run."""


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a tree of tensors and JSON values: the whole file or nothing."""
    tensors: dict[str, Tensor] = {}
    skeleton = _take_out(state, tensors, "")
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(copies, {_KEY: json.dumps(skeleton)}))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The tree that was saved."""
    try:
        with safe_open(path, "pt") as file:
            skeleton = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not an intact checkpoint ({error}); delete it and start again") from error
    restored: dict[str, Any] = _put_back(skeleton, tensors)
    return restored


def _take_out(node: Any, tensors: dict[str, Tensor], place: str) -> Any:
    """The tree with every tensor replaced by {"tensor": its place}."""
    if isinstance(node, Tensor):
        tensors[place] = node
        return {"tensor": place}
    if isinstance(node, dict):
        # JSON's keys are strings; an optimiser's are numbers.
        items = [[key, _take_out(value, tensors, f"{place}/{key}")] for key, value in node.items()]
        return {"items": items}
    if isinstance(node, list | tuple):
        return [_take_out(value, tensors, f"{place}/{i}") for i, value in enumerate(node)]
    return node


def _put_back(node: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, dict) and "tensor" in node:
        return tensors[node["tensor"]]
    if isinstance(node, dict):
        return {key: _put_back(value, tensors) for key, value in node["items"]}
    if isinstance(node, list):
        return [_put_back(value, tensors) for value in node]
    return node


class Run:
    """Where a training run stands, and what a checkpoint keeps of it."""

    def __init__(self, identity: dict[str, Any]) -> None:
        self.identity = identity  # what must be the same for a checkpoint to be of this run
        self.stage = self.epochs_before = 0
        self.epoch = self.step = 0
        self.loss = 0.0
        self.right = self.seen = 0
        self.history: list[EpochRecord] = []
        self.best: dict[str, Stored] | None = None
        self.best_accuracy = -1.0
        self.began = time.perf_counter()
        self._saved: dict[str, Any] | None = None  # of a checkpoint, for the learner to come

    def begin_stage(self) -> None:
        """Go on to what the method trains next."""
        self.stage, self.epochs_before = self.stage + 1, len(self.history)
        self.epoch = self.step = 0
        self.best, self.best_accuracy = None, -1.0

    def add(self, step: Step) -> None:
        """Count one step."""
        self.loss += step.loss * step.images
        self.right += step.right
        self.seen += step.images

    def close_epoch(self, accuracy: float | None) -> None:
        """Put the epoch in the history, and go on to the next."""
        epoch, right = self.epochs_before + self.epoch, 100 * self.right / self.seen
        record = EpochRecord(epoch, self.loss / self.seen, right, accuracy)
        self.history.append(record)
        self.epoch, self.step = self.epoch + 1, 0
        self.loss, self.right, self.seen = 0.0, 0, 0

    def finish_epoch(self, learner: Learner, accuracy: float | None) -> None:
        """Close the epoch, and keep what was learned if it is the best so far."""
        self.close_epoch(accuracy)
        learner.note(self.history[-1])
        if accuracy is None or learner.recipe.selection != "best":
            return
        if accuracy > self.best_accuracy:
            self.best, self.best_accuracy = copied(learner.stored()), accuracy

    def save(self, path: Path, learner: Learner) -> None:
        """Write all that is needed to go on from here, if that is the learner's part."""
        if not learner.saves:
            return
        state = {
            "identity": self.identity,
            "stage": [self.stage, self.epochs_before],
            "place": [self.epoch, self.step, self.loss, self.right, self.seen],
            "history": [asdict(record) for record in self.history],
            "best": pack_stored(self.best or {}),
            "best_accuracy": self.best_accuracy,
            "random": torch.get_rng_state(),
        }
        save_checkpoint(path, state | learner.state())

    def load(self, path: Path) -> dict[str, Any]:
        """Go on from a checkpoint of the same run and give all of it; raise if it is of another."""
        state = _current(load_checkpoint(path))
        for name, value in self.identity.items():
            then = state["identity"].get(name)
            if plain(then) != plain(value):
                raise CheckpointError(
                    f"{path} is of a run with another {name} ({then}, now {value}); "
                    "resume with the same options, or delete it to start again"
                )
        self.stage, self.epochs_before = state["stage"]
        self._saved = state
        self.epoch, self.step, self.loss, self.right, self.seen = state["place"]
        self.history = [EpochRecord(**record) for record in state["history"]]
        self.best_accuracy = state["best_accuracy"]
        self.best = unpack_stored(state["best"]) or None
        return state

    def restart(self, learner: Learner) -> None:
        """Give a learner what the checkpoint has for it, if there was one."""
        if self._saved is None:
            return
        learner.load(self._saved)
        torch.set_rng_state(self._saved["random"])
        self._saved = None


def _current(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as it is written now; those of domains that learn together were once another."""
    if "stage" in state:
        return state
    (steps, *each), (epoch, done, best) = state["identity"], state["place"]
    domains = state["domains"]
    sums = [sum(values) for values in zip(*(its["sums"][:3] for its in domains), strict=True)]
    columns = zip(*(its["history"] for its in domains), strict=True)
    return state | {
        "identity": {"number of rounds": steps, "domains": each},
        "stage": [0, 0],
        "place": [epoch, done * len(domains), *sums],
        "history": [{name: _mean([r[name] for r in records]) for name in records[0]} for records in columns],
        "best": {f"{place}/{n}": t for place, its in enumerate(domains) for n, t in its["best"].items()},
        "best_accuracy": best,
    }


def _mean(values: list[Any]) -> Any:
    return None if None in values else sum(values) / len(values)


def domain_identity(domain: Domain, recipe: Recipe, seed: int) -> dict[str, Any]:
    """What a run is that trains a domain."""
    return {
        "seed": seed,
        "recipe": recipe.to_json(),
        "base": domain.fingerprint,
        "method": {"name": domain.method.name} | domain.method.options(),
        "classes": domain.classes,
    }


def pack_stored(stored: dict[str, Stored]) -> dict[str, Any]:
    """Stored tensors as a checkpoint has them, with copies of bits, which a domain may hold too."""
    return {
        name: {"words": t.words.clone(), "shape": list(t.shape)} if isinstance(t, Bits) else t
        for name, t in stored.items()
    }


def unpack_stored(packed: dict[str, Any]) -> dict[str, Stored]:
    """The stored tensors that were packed."""
    return {name: Bits(t["words"], tuple(t["shape"])) if isinstance(t, dict) else t for name, t in packed.items()}


def plain(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def copied(stored: dict[str, Stored]) -> dict[str, Stored]:
    """Stored tensors that training on will not change; bits never do."""
    return {n: t if isinstance(t, Bits) else t.clone() for n, t in stored.items()}
