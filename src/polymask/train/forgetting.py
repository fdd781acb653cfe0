"""What is left of a base that a method has moved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from polymask.core.base import Base
from polymask.errors import MethodError
from polymask.train.predict import Batches, accuracy, own_network

_BATCHES = 4  # of each domain, for the agreement


@dataclass(frozen=True)
class BaseAfter:
    """What became of a base, and of its own classifier, in percent.

    `change` is |W' - W| / |W| over all tensors that were moved. `agreement` is the share of the
    domains' images that the base's own classifier still puts in the same class; the accuracies are
    on the base's own images, where those were given.
    """

    change: float
    agreement: float | None
    accuracy_before: float | None
    accuracy_after: float | None


@torch.no_grad()
def measure_base(base: Base, moved: Mapping[str, Tensor], images: Sequence[Batches], own: Batches | None) -> BaseAfter:
    """Compare the base with what it was, by its weights and by its classifier."""
    if not moved:
        raise MethodError("the method moves the base, but its `moved` gives no tensors")
    before = torch.stack([base.tensor(name).double().norm() for name in moved]).norm()
    gap = torch.stack([(moved[name].double() - base.tensor(name).double()).norm() for name in moved]).norm()
    change = float(gap / before)
    if base.head is None:
        return BaseAfter(change, None, None, None)
    then, now = own_network(base), own_network(base, moved)
    same = total = 0
    for batches in images:
        for batch, _ in islice(batches.batches(0), _BATCHES):
            batch = base.placed(batch)
            same += int((then(batch).argmax(1) == now(batch).argmax(1)).sum())
            total += len(batch)
    accuracies = [None if own is None else accuracy(net, own, base) for net in (then, now)]
    return BaseAfter(change, 100 * same / total, *accuracies)
