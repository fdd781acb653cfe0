"""Where a training run stands, and the file that keeps it: safetensors, with all but the tensors as JSON.

A state is a tree of dicts and lists whose leaves are tensors, numbers, strings, booleans and None.
It is written to a temporary file, then renamed; reading it never unpickles.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from polymask.core.bits import Bits
from polymask.core.domain import START, Domain
from polymask.core.method import Method
from polymask.core.network import digest_tensors
from polymask.core.parts import Stored
from polymask.core.target import Target
from polymask.data.batches import Batches
from polymask.data.loader import Loader
from polymask.errors import InterruptedTraining, PolymaskError
from polymask.files import digest, write_atomically
from polymask.train.learner import EpochRecord, Learner, Step
from polymask.train.recipe import Recipe

_KEY, _OLD_KEY = "polymask-checkpoint-2", "polymask-checkpoint"  # the old ones have no sum
_SUM = 64  # characters of a sha256, before the JSON


class CheckpointError(PolymaskError):
    """A checkpoint is damaged, or belongs to another run."""


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a tree of tensors and JSON values: the whole file or nothing."""
    tensors: dict[str, Tensor] = {}
    skeleton = _take_out(state, tensors, "")
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(skeleton)
    write_atomically(path, save(copies, {_KEY: digest(text, digest_tensors(copies)) + text}))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The tree that was saved."""
    try:
        with safe_open(path, "pt") as file:
            notes = file.metadata() or {}
            # Copies: tensors of a file may lie at odd addresses, where sums come out in another order.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        text = notes[_OLD_KEY] if _OLD_KEY in notes else notes[_KEY][_SUM:]
        if _OLD_KEY not in notes and notes[_KEY][:_SUM] != digest(text, digest_tensors(tensors)):
            raise ValueError("its sha256 is not the one it was saved with")
        restored: dict[str, Any] = _put_back(json.loads(text), tensors)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not an intact checkpoint ({error}); delete it and start again") from error
    return restored


def _take_out(node: Any, tensors: dict[str, Tensor], place: str) -> Any:
    """The tree with every tensor replaced by {"tensor": its place}."""
    if isinstance(node, Tensor):
        tensors[place] = node
        return {"tensor": place}
    if isinstance(node, dict):
        # JSON's keys are strings; an optimiser's are numbers.
        return {"items": [[key, _take_out(value, tensors, f"{place}/{key}")] for key, value in node.items()]}
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
    """Where a training run stands, and what its checkpoint keeps of it, if it has one.

    `identity` is what must be the same for a checkpoint to be of this run. With `resume` it goes on
    from the checkpoint, if there is one; `saved` is then all of it, until a learner has its part.
    """

    def __init__(self, identity: dict[str, Any], checkpoint: Path | None = None, *, resume: bool = False) -> None:
        self.identity, self.checkpoint = identity, checkpoint
        self.stage = self.epochs_before = 0
        self.epoch = self.step = 0
        self.loss = 0.0
        self.right: float = 0
        self.seen = 0
        self.history: list[EpochRecord] = []
        self.best: dict[str, Stored] | None = None
        self.best_accuracy = -1.0
        self.began = time.perf_counter()
        self.saved: dict[str, Any] | None = None
        if resume and checkpoint is not None and checkpoint.exists():
            self._load(checkpoint)

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

    def finish_epoch(self, learner: Learner, accuracy: float | None) -> None:
        """Put the epoch in the history, keep what was learned if it is the best so far, and go on to the next."""
        epoch, shown = self.epochs_before + self.epoch, learner.target.scale * self.right / self.seen
        self.history.append(EpochRecord(epoch, self.loss / self.seen, shown, accuracy))
        self.epoch, self.step = self.epoch + 1, 0
        self.loss, self.right, self.seen = 0.0, 0, 0
        learner.note(self.history[-1])
        if accuracy is None or learner.recipe.selection != "best":
            return
        if self.best is None or learner.target.better(accuracy, self.best_accuracy):
            self.best, self.best_accuracy = copied(learner.stored()), accuracy

    def stalled(self, learner: Learner) -> int | None:
        """The best epoch so far of this stage, where the recipe's patience has ended since; else None."""
        found = [record.val_accuracy for record in self.history[self.epochs_before :]]
        best, patience = learner.target.best(found), learner.recipe.patience
        if best is None or patience is None or len(found) - 1 - found.index(best) < patience:
            return None
        return self.epochs_before + found.index(best)

    def save(self, learner: Learner) -> None:
        """Write all that is needed to go on from here, if there is a file for it and it is this learner's to write."""
        if self.checkpoint is None or not learner.saves:
            return
        state = {
            "identity": self.identity,
            "stage": [self.stage, self.epochs_before],
            "place": [self.epoch, self.step, self.loss, self.right, self.seen],
            "history": [asdict(record) for record in self.history],
            "best": {  # with copies of bits, which a domain may hold too
                name: {"words": t.words.clone(), "shape": list(t.shape)} if isinstance(t, Bits) else t
                for name, t in (self.best or {}).items()
            },
            "best_accuracy": self.best_accuracy,
            "random": torch.get_rng_state(),
        }
        save_checkpoint(self.checkpoint, state | learner.state())

    def interrupt(self, learner: Learner, why: str) -> NoReturn:
        """Save, and say how to go on."""
        self.save(learner)
        if self.checkpoint is None:
            raise InterruptedTraining(f"{why}; it had no checkpoint to save to")
        raise InterruptedTraining(f"{why} and saved {self.checkpoint}; the same again with resume goes on from there")

    def _load(self, path: Path) -> None:
        """Go on from a checkpoint of the same run; raise if it is of another."""
        self.saved = state = read_state_of(path, self.identity)
        self.stage, self.epochs_before = state["stage"]
        self.epoch, self.step, self.loss, self.right, self.seen = state["place"]
        self.history = [EpochRecord(**record) for record in state["history"]]
        self.best_accuracy = state["best_accuracy"]
        best = state["best"].items()
        self.best = {n: Bits(t["words"], tuple(t["shape"])) if isinstance(t, dict) else t for n, t in best} or None

    def restart(self, learner: Learner) -> None:
        """Give a learner what the checkpoint has for it, if there was one."""
        if self.saved is not None:
            learner.load(self.saved)
            torch.set_rng_state(self.saved["random"])
            self.saved = None


def read_state_of(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds; raise where it is of a run with other settings than these, and say which."""
    state = _current(load_checkpoint(path))
    found = list(_differences(plain(state["identity"]), plain(identity)))
    if found:
        raise CheckpointError(
            f"{path} is of a run with other settings: {', '.join(found)}; "
            "give those again to go on, or start over without it"
        )
    return state


def _differences(then: Any, now: Any, name: str = "") -> Iterator[str]:
    """What differs between two identities; a setting that the older one does not know is not compared."""
    if then == now:
        return
    if isinstance(then, dict) and isinstance(now, dict):
        for key in (key for key in now if key in then):
            yield from _differences(then[key], now[key], name if key == "name" else key)
    elif isinstance(then, list) and isinstance(now, list) and then and isinstance(then[0], dict):
        for pair in zip(then, now, strict=False):
            yield from _differences(*pair, name)
    else:
        yield f"{name} {_short(then)} → {_short(now)}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        some = ", ".join(map(str, value[:3])) + (" …" if len(value) > 3 else "")
        return f"{some} ({len(value)})" if len(value) > 3 else some
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else str(value)


def _current(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as it is written now; those of domains that learn together were once another."""
    if "stage" in state:
        return state
    (steps, *each), (epoch, done, best) = state["identity"], state["place"]
    domains = state["domains"]
    sums = [sum(values) for values in zip(*(its["sums"][:3] for its in domains), strict=True)]
    epochs = zip(*(its["history"] for its in domains), strict=True)
    return state | {
        "identity": {"number of rounds": steps, "domains": each},
        "stage": [0, 0],
        "place": [epoch, done * len(domains), *sums],
        "history": [{name: _mean([r[name] for r in records]) for name in records[0]} for records in epochs],
        "best": {f"{place}/{n}": t for place, its in enumerate(domains) for n, t in its["best"].items()},
        "best_accuracy": best,
    }


def _mean(values: list[Any]) -> Any:
    return None if None in values else sum(values) / len(values)


def epochs_until_stalled(results: Sequence[float | None], target: Target, patience: int | None) -> int:
    """How many of a stage's epochs are run, by what they would give on val."""
    best = 0
    for epoch, result in enumerate(results):
        first = results[best]
        if result is None or first is None or patience is None:
            return len(results)
        best = epoch if target.better(result, first) else best
        if epoch - best >= patience:
            return epoch + 1
    return len(results)


def domain_identity(domain: Domain, recipe: Recipe, seed: int) -> dict[str, Any]:
    """What a run is that trains a domain."""
    start = domain.recipe.get(START)
    settings = settings_identity(domain.method, domain.fingerprint, domain.classes, recipe, seed, start)
    return settings | ({"target": note} if (note := domain.target.note()) else {})


def settings_identity(
    method: Method, fingerprint: str, classes: Sequence[str] | None, recipe: Recipe, seed: int, start: Any = None
) -> dict[str, Any]:
    """The same, of a domain that is not there yet; `start` is the note of the one that it begins as, if it does."""
    named = {"name": method.name} | method.options()
    about = {"seed": seed, "recipe": asdict(recipe), "base": fingerprint}  # with the fields that are not given
    about |= {} if start is None else {START: start}
    return about | {"method": named, "classes": None if classes is None else list(classes)}


def images_identity(train: Batches) -> dict[str, Any]:
    """What a run's training images are: how many, their labels, and a grid of pixels of each, all in order."""
    if not isinstance(train, Loader):
        return {"batches": len(train)}
    cache = train.cache
    looks = (f"{one.shape}".encode() + one[::8, ::8].tobytes() for one in cache.held if one is not None)
    labels = digest(cache.labels.numpy().tobytes())
    return {"training images": len(cache), "labels": labels, "images": digest(*looks)}


def plain(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    return json.loads(json.dumps(value))


def copied(stored: dict[str, Stored]) -> dict[str, Stored]:
    """Stored tensors that training on will not change; bits never do."""
    return {n: t if isinstance(t, Bits) else t.clone() for n, t in stored.items()}
