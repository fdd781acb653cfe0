"""The scales of a one-bit domain, refined until it says what its teacher says.

    min over θ of  mean (z~ - z')²,        W~ = W + e^θ α (2M - 1), one θ a site

z' are the teacher's logits, z~ the domain's; masks, norms, biases and head stay as they are. α
differs by orders of magnitude between sites, and a step of θ is a step of α in proportion: one rate
serves all of them, α keeps its sign, and a site that was not changed (α = 0) stays so.
"""

import math
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from itertools import count, islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.errors import TrainingError
from polymask.methods.bitdelta import SignsTransform
from polymask.train.fit import Listener
from polymask.train.learner import placed
from polymask.train.predict import Batches, logits
from polymask.train.recipe import Recipe


def refine_scales(
    base: Base,
    domain: Domain,
    teacher: nn.Module,
    train: Batches,
    *,
    recipe: Recipe,
    steps: int,
    rate: float,
    listener: Listener | None = None,
) -> None:
    """Change the α of a stored BitDelta domain in `steps` steps of Adam; labels are not used.

    The rate falls to zero along half a cosine. Everything runs in eval mode. The recipe decides
    how images are laid out in memory, nothing else.
    """
    listener = listener or Listener()
    bits = {n: t for n, t in domain.named_transforms() if isinstance(t, SignsTransform)}
    with torch.no_grad():
        fixed = domain.weights(base)
        changes = {name: t.alpha * (2 * t.mask().to(t.alpha) - 1) for name, t in bits.items()}
    theta = torch.zeros(len(bits), device=base.device, requires_grad=True)
    optimiser = torch.optim.Adam([theta], rate)
    listener.begin(replace(recipe, epochs=1), steps, 0)
    try:
        with closing(_images(train, base, recipe)) as images:
            for step, batch in enumerate(islice(images, steps)):
                optimiser.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
                weights = fixed | {
                    name: (base.tensor(name) + factor * changes[name]).to(fixed[name].dtype)
                    for name, factor in zip(bits, theta.exp().unbind(), strict=True)
                }
                found = domain.classify(base.run(weights, batch))
                loss = F.mse_loss(found, logits(teacher, batch))
                value = loss.item()
                if not math.isfinite(value):
                    raise TrainingError(
                        f"the distance from the checkpoint is {value} in step {step}; "
                        f"the rate is {rate}: try a smaller one"
                    )
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                listener.step(0, step + 1, value, len(batch), None)
    finally:
        listener.end()
    with torch.no_grad():
        for transform, factor in zip(bits.values(), theta.exp(), strict=True):
            transform.alpha.mul_(factor)


def _images(train: Batches, base: Base, recipe: Recipe) -> Generator[Tensor, None, None]:
    """Batches of images, epoch after epoch."""
    for epoch in count():
        for images, labels in train.batches(epoch):
            yield placed(images, labels, base, recipe)[0]
