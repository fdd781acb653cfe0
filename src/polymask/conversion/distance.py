"""How far a domain is from the fine-tuned network that it was made from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polymask.conversion.finetuned import Finetuned
from polymask.core.base import Base
from polymask.train.predict import Batches, logits


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
    base: Base,
    net: nn.Module,
    teacher: nn.Module,
    batches: Batches,
    split: str,
    *,
    labelled: bool,
) -> OutputDistance:
    """The distance of a merged domain's logits from the fine-tuned network's, both of a base."""
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
