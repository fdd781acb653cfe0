"""A network that was fine-tuned from a base: its state dict under the base's names, and how far a domain is from it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.network import copy_with, put_module
from polymask.core.parts import COUNTER
from polymask.data.batches import Batches
from polymask.errors import PolymaskError
from polymask.nets.base_file import read_checkpoint
from polymask.nets.zoo import build
from polymask.train.predict import logits

_NESTS = ("state_dict", "model_state_dict", "model", "net")  # where training scripts keep theirs
_PREFIXES = ("module.", "model.", "net.")  # what wrappers put before every name
_COMPILED = "_orig_mod."  # what torch.compile puts anywhere in a name
_MOST = 20  # names of a kind in a message


class ConvertError(PolymaskError):
    """A fine-tuned network cannot be converted: it is not one of this base."""


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned network: tensors by the base's names, and its classifier, on its device."""

    source: str  # what messages call it
    tensors: dict[str, Tensor]  # all of the state dict but the counters of batches, tied ones once
    weight: Tensor  # (classes, features)
    bias: Tensor  # (classes,)

    @classmethod
    def read(cls, base: Base, state: Mapping[str, Any] | str | Path) -> Self:
        """Lay a state dict, or that of a file, on a base; raise one error that names every misfit.

        Wrappers' prefixes ("module.", "model.", "_orig_mod.") are taken off the names, and a state
        dict inside a training script's dict ("state_dict", "model") is found. A folder is one that an
        image classifier of transformers was saved to.
        """
        source = "the state dict"
        if isinstance(state, str | Path):
            source, path = str(state), Path(state)
            # transformers keeps its tensors under other names on disk than in the network.
            state = build(f"transformers:{path}")[0].state_dict() if path.is_dir() else read_checkpoint(path)
        if base.classifier is None or not isinstance(base.head, nn.Linear):
            raise ConvertError(
                f"base {base.name} has no linear classifier, so {source} gives no classes; load "
                "the base with classifier=NAME of the last linear layer"
            )
        return cls(source, *_fitted(base, state, source))

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.weight)

    def reordered(self, order: Sequence[int]) -> Self:
        """The same network with output i where output order[i] was."""
        rows = torch.tensor(order, device=self.weight.device)
        return replace(self, weight=self.weight[rows], bias=self.bias[rows])

    def delta(self, base: Base, name: str) -> Tensor:
        """Δ = W' - W of a tensor, in single precision or better."""
        before = base.tensor(name)
        dtype = before.dtype if before.dtype == torch.float64 else torch.float32
        return self.tensors[name].to(dtype) - before.to(dtype)

    def network(self, base: Base) -> nn.Module:
        """The fine-tuned network itself, in eval mode: a structural copy of the base."""
        assert base.classifier is not None
        net = copy_with(base.net, self.tensors)
        classes, features = self.weight.shape
        head = nn.Linear(features, classes, device="meta")
        head.weight = nn.Parameter(self.weight, requires_grad=False)
        head.bias = nn.Parameter(self.bias, requires_grad=False)
        put_module(net, base.classifier, head)
        return net.eval()


def _fitted(base: Base, state: Mapping[str, Any], source: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The tensors by the base's names, the classifier's weight and its bias; raises where anything is wrong."""
    weight, bias = f"{base.classifier}.weight", f"{base.classifier}.bias"
    own = {n: t for n, t in base.net.state_dict(keep_vars=True).items() if not n.endswith(COUNTER)}
    named = _plain_names(_unnested(state), {*own, weight, bias})
    given = {name: value for name, value in named.items() if not name.endswith(COUNTER)}

    first: dict[int, str] = {}  # tied tensors have several names, and may come under any
    aliases = {name: first.setdefault(id(tensor), name) for name, tensor in own.items()}
    places = {aliases[name]: name for name in aliases if name in given}
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    classes = tuple(getattr(given.get(weight), "shape", (None,))[:1])
    shapes |= {weight: (*classes, base.feature_dim), bias: classes}
    known = {name: value for name, value in given.items() if name in shapes}
    problems = {
        "it lacks": [name for name in (*first.values(), weight) if name not in places and name not in given],
        "it has unknown": [name for name in given if name not in shapes],
        "of another shape are": [
            f"{name} ({_shape(value)}, not {shapes[name]})"
            for name, value in known.items()
            if _shape(value) != str(shapes[name])
        ],
        "of values that are not finite are": [
            name for name, value in known.items() if isinstance(value, Tensor) and not torch.isfinite(value).all()
        ],
    }
    texts = []
    for what, names in problems.items():
        if names:
            more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
            texts.append(f"{what} {', '.join(names[:_MOST])}{more}")
    if texts:
        raise ConvertError(
            f"{source} does not fit base {base.name}: {'; '.join(texts)}; give the base that it "
            "was fine-tuned from, and a state dict with that base's names"
        )
    assert isinstance(base.head, nn.Linear)
    tensors = {name: known[place].to(own[name]) for name, place in places.items()}
    rows = known[weight].to(base.head.weight)
    return tensors, rows, known.get(bias, torch.zeros(len(rows))).to(rows)


def _unnested(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The innermost state dict of a training script's dict."""
    for name in _NESTS:
        if isinstance(state.get(name), Mapping):
            return _unnested(state[name])
    return state


def _plain_names(state: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """The names without the prefix, of one or two wrappers, that leaves most of them known."""
    named = {str(name).replace(_COMPILED, ""): value for name, value in state.items()}
    prefixes = ("".join(words) for depth in range(3) for words in product(_PREFIXES, repeat=depth))
    best = max(prefixes, key=lambda p: sum(name.removeprefix(p) in known for name in named))
    return {name.removeprefix(best): value for name, value in named.items()}


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


@dataclass(frozen=True)
class WeightDistance:
    """In the weights of the sites: W of the base, W' of the fine-tuned network, W~ of the domain.

    `error` is what the domain misses of the change, 0 at best and 1 where it keeps none of it;
    for normally distributed changes the nearest signs and scale give sqrt(1 - 2/π) = 0.603.
    """

    change: float  # ‖W' - W‖ / ‖W‖
    error: float  # ‖W~ - W'‖ / ‖W' - W‖
    sites: dict[str, float]  # the error of each site that the fine-tuning changed


@dataclass(frozen=True)
class OutputDistance:
    """In the logits z' of the fine-tuned network and z~ of the domain, over a split's images."""

    split: str
    images: int
    mean: float  # of |z~ - z'|
    max: float
    relative: float  # ‖z~ - z'‖ / ‖z'‖
    agreement: float  # images of the same first class, in percent
    checkpoint_accuracy: float | None  # in percent; None where the labels are of other classes
    pack_accuracy: float | None


@torch.no_grad()
def weight_distance(base: Base, weights: Mapping[str, Tensor], tuned: Finetuned) -> WeightDistance:
    """The distance of `weights`, which a domain gives by name, from the fine-tuned ones."""
    size = changed = missed = 0.0
    sites = {}
    for name in (name for name in base.all_sites if name in weights):
        after = tuned.tensors[name].double()
        before = base.tensor(name).double()
        change, miss = _square(after - before), _square(weights[name].double() - after)
        size, changed, missed = size + _square(before), changed + change, missed + miss
        if change:
            sites[name] = math.sqrt(miss / change)
    return WeightDistance(_root(changed, size), _root(missed, changed), sites)


@torch.no_grad()
def output_distance(
    base: Base, domain: Domain, teacher: nn.Module, batches: Batches, split: str, *, labelled: bool
) -> OutputDistance:
    """The distance of a domain's logits from those of the fine-tuned network, on the images of a split."""
    net = domain.merged(base)
    ours, theirs, labels = [], [], []
    for images, truth in batches.batches():
        images = base.placed(images)
        ours.append(logits(net, images).double().cpu())
        theirs.append(logits(teacher, images).double().cpu())
        labels.append(truth)
    got, wanted, true = torch.cat(ours), torch.cat(theirs), torch.cat(labels)
    difference = (got - wanted).abs()
    return OutputDistance(
        split=split,
        images=len(got),
        mean=difference.mean().item(),
        max=difference.max().item(),
        relative=_root(_square(difference), _square(wanted)),
        agreement=_percent(got.argmax(1), wanted.argmax(1)),
        checkpoint_accuracy=_percent(wanted.argmax(1), true) if labelled else None,
        pack_accuracy=_percent(got.argmax(1), true) if labelled else None,
    )


def _square(tensor: Tensor) -> float:
    return tensor.square().sum().item()


def _root(part: float, whole: float) -> float:
    """The root of a share; of nothing, nothing is missed."""
    return math.sqrt(part / whole) if whole else 0.0


def _percent(guesses: Tensor, truth: Tensor) -> float:
    return 100 * (guesses == truth).double().mean().item()
