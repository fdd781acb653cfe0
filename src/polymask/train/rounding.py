"""Numbers of 16 bits: norms, scalars and head are rounded to them, unless val says that this costs anything."""

from typing import TYPE_CHECKING, Any

import torch

from polymask.core.accounting import in_halves
from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.data.batches import Batches, as_batches
from polymask.train.predict import all_labels, evaluate, network
from polymask.train.state import copied

if TYPE_CHECKING:
    from polymask.train.ranks import Ranks

LOSS_MAY_GROW = 1.01  # where rounding to 16 bits costs more than an image of val


def round_numbers(
    base: Base, domain: Domain, val: Any, before: float | None, ranks: "Ranks | None"
) -> tuple[bool, float | None]:
    """Round norms, scalars and head to 16 bits, unless val says that this costs anything.

    `before` is what val says of the domain as it is, where that is known. A tenth of a percent may be lost, or one
    image. With few images more of them may lie on the border between two classes, where any rounding decides: classes
    may lose more as long as their loss grows by less than a hundredth. Gives whether numbers are rounded, and what val
    says of the domain now.
    """
    exact = copied(domain.stored())
    if val is None:
        domain.restore(in_halves(domain))
        return True, None
    batches, measure = as_batches(val, domain.input, domain.classes), evaluate if ranks is None else ranks.evaluate
    before = measure(base, domain, batches) if before is None else before
    domain.restore(in_halves(domain))
    after = measure(base, domain, batches)
    lost = after - before if domain.target.lower_is_better else before - after
    allowed = max(0.1, 100 / len(all_labels(batches))) if domain.target.kind == "classes" else 1e-3 * abs(before)
    if lost <= allowed:
        return True, after
    rounded, losses = copied(domain.stored()), []
    if domain.target.kind == "classes" and ranks is None:
        losses.append(_mean_loss(base, domain, batches))
    domain.restore(exact)
    if not losses or losses[0] > LOSS_MAY_GROW * _mean_loss(base, domain, batches):
        return False, before
    domain.restore(rounded)
    return True, after


@torch.no_grad()
def _mean_loss(base: Base, domain: Domain, batches: Batches) -> float:
    """The mean of the target's loss over images."""
    net, total, images = network(base, domain), 0.0, 0
    for some, labels in batches.batches():
        total += len(labels) * float(domain.target.loss(net(base.placed(some)).float(), labels.to(base.device)))
        images += len(labels)
    return total / images
