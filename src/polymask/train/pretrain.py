"""From images to a base: a whole network, from random weights to its file.

Nothing is frozen and there is no domain yet: every parameter learns by one optimiser. The loop, its checkpoints and its
promises are those that domains are trained by (`fit.run_epochs`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polymask.core.base import Base
from polymask.core.input import InputSpec
from polymask.core.network import choose_device, tensor_of, trains_channels_last
from polymask.core.parts import Stored
from polymask.data.batches import Batches
from polymask.data.images import DomainData, require_classes
from polymask.data.load import load_data
from polymask.errors import BaseError
from polymask.nets.base_file import BaseNotes, write_base
from polymask.nets.zoo import build
from polymask.train.descent import descend, make_optimiser
from polymask.train.fit import Listener, require_val, run_epochs, seeded, stop_signals
from polymask.train.learner import EpochRecord, Learner, Step, to_device
from polymask.train.predict import accuracy
from polymask.train.recipe import Recipe, get_recipe
from polymask.train.state import Run

if TYPE_CHECKING:
    pass


from polymask.train.learn import Loaders, make_loaders


@dataclass(frozen=True)
class Pretrained:
    """A trained network in eval mode, with what was measured; accuracies in percent."""

    name: str
    net: nn.Module
    input: InputSpec
    classes: tuple[str, ...]
    history: list[EpochRecord]
    test_accuracy: float | None
    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    def base(self) -> Base:
        """The network as a base, as `load_base` gives it from the file."""
        return Base(self.net, name=self.name, input=self.input)

    def save(self, path: str | Path) -> None:
        """Write the file that `load_base(path)` reads: the whole of it or nothing."""
        notes = BaseNotes(self.name, list(self.classes), self.input.to_json(), self.recipe, self.metrics)
        write_base(path, self.net, notes)


def pretrain(
    name: str,
    data: DomainData | str | Path,
    recipe: str | Recipe = "pretrain",
    *,
    loaders: Loaders | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    checkpoint: Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
) -> Pretrained:
    """Train the network `name` from random weights, and measure it on test.

    `name` is a built-in network, "timm:NAME" or "torchvision:NAME"; its classifier gets the classes
    of `data`. With `checkpoint` the state is written there after every epoch and when a signal asks
    to stop; `resume` goes on from it, to the same result to the bit.
    """
    recipe, place = get_recipe(recipe), choose_device(device or "cpu")
    if not isinstance(data, DomainData):
        data = load_data(data, seed=seed)
    require_classes(data, "pretraining")
    with seeded(seed):
        net, spec = build(name, pretrained=False, classes=len(data.classes))
    spec = recipe.input(spec, squash=data.squash)
    _check(net, name, spec, len(data.classes))
    loaders = loaders or make_loaders(data, spec, recipe, seed=seed)
    require_val(recipe, loaders.val)

    torch.manual_seed(seed)
    learner = NetworkLearner(net.to(place), recipe)
    run = Run(pretrain_identity(name, data, recipe, seed), checkpoint, resume=resume)
    with stop_signals() as stop:
        run_epochs(learner, loaders.train, loaders.val, run, listener or Listener(), stop)
    if run.best is not None:
        net.load_state_dict(run.best)
    tested = None if loaders.test is None else learner.measure(loaders.test)
    validated = run.history[-1].val_accuracy if run.best is None else run.best_accuracy
    about = recipe.to_json() | {"seed": seed, "data": data.name}
    metrics = {"val_accuracy": validated, "test_accuracy": tested}
    return Pretrained(name, net.eval(), spec, data.classes, run.history, tested, about, metrics)


def pretrain_identity(name: str, data: DomainData, recipe: Recipe, seed: int) -> dict[str, Any]:
    """What a run is that pretrains."""
    about = {"seed": seed, "recipe": asdict(recipe), "network": name, "classes": list(data.classes)}
    return about | {"training set": [data.name, len(data.train)]}


class NetworkLearner(Learner):
    """A whole network with the one optimiser that it is trained by."""

    def __init__(self, net: nn.Module, recipe: Recipe) -> None:
        self.net, self.recipe = net, recipe
        first = next(net.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.channels_last = recipe.channels_last and trains_channels_last(net)
        learned = [p for p in net.parameters() if p.requires_grad]
        group = {"params": learned, "weight_decay": recipe.weight_decay}
        self.optimisers = {"network": make_optimiser([group], recipe.optimiser, recipe.rate, recipe.momentum)}

    def begin_epoch(self) -> None:
        self.net.train()

    def step(self, images: Tensor, labels: Tensor, epoch: float) -> Step:
        for group in self.optimisers["network"].param_groups:
            group["lr"] = self.recipe.rate * self.recipe.factor(epoch)
        images, labels = to_device(images, labels, self.device, channels_last=self.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.recipe.autocast):
            logits = tensor_of(self.net(images))
            loss = self.target.loss(logits, labels, self.recipe.label_smoothing)
        value = descend(loss, self.optimisers.values())
        return Step(value, self.target.tally(logits.detach(), labels), len(labels))

    def settle(self, train: Batches, epoch: int) -> None:
        """Nothing to do: the statistics of norms are what the steps have left."""

    def measure(self, val: Batches) -> float:
        return accuracy(self.net.eval(), val, lambda images: images.to(self.device, self.dtype))

    def stored(self) -> dict[str, Stored]:
        return dict(self.net.state_dict())

    def state(self) -> dict[str, Any]:
        # A copy each: tensors in a file of safetensors cannot share memory.
        return super().state() | {"network": {name: t.clone() for name, t in self.net.state_dict().items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.net.load_state_dict(state["network"])


def _check(net: nn.Module, name: str, spec: InputSpec, classes: int) -> None:
    """Raise unless the network makes logits of its classes from images as they will be fed."""
    if getattr(net, "aux_logits", False):
        raise BaseError(f"{name} has auxiliary classifiers, which are not trained here; choose another")
    try:
        with torch.no_grad():
            found = tuple(tensor_of(net.eval()(torch.zeros(1, *spec.shape))).shape[1:])
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
        raise BaseError(f"{name} does not run on images of shape {spec.shape}: {error}; give another side") from error
    if found != (classes,):
        raise BaseError(
            f"{name} gives {found} for an image, not {classes} logits; choose a network that classifies images"
        )
