"""A one-bit domain, made better: its scales by what its teacher says, or affine masks that go on from it.

Refining the scales of a one-bit domain:

    min over θ of  mean (z~ - z')²,        W~ = W + e^θ α (2M - 1), one θ for each α

z' are the teacher's logits, z~ the domain's; masks, norms, biases and head stay as they are. α
differs by orders of magnitude between sites, and a step of θ is a step of α in proportion: one rate
serves all of them, α keeps its sign, and a site that was not changed (α = 0) stays so.

Affine masks that go on learning from where a one-bit domain stands:

    k0 = 1,  k1 = -α,  k2 = 2α,  k3 = 0,        R = ±r max(1, 40 |Δ| / mean |Δ|),  + where M = 1

gives W~ of the one-bit domain to the bit. r is the rate of the masks. A step of Adam moves a score by about r whatever
its gradient, so a weight whose fine-tuning moved it as far as the mean flips after some 40 steps that all ask for it,
and one that hardly moved, of which the sign says least, after one. Scores of a fresh domain are one or two steps from
the threshold: in noise alone half of the signs would be lost before the gradients mean anything.
"""

import math
from contextlib import closing
from dataclasses import replace
from itertools import count, islice
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from polymask.conversion.finetuned import Finetuned
from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.registry import create_method
from polymask.data.batches import Batches
from polymask.errors import TrainingError
from polymask.methods.affine.method import AffineTransform
from polymask.methods.bitdelta import BitDelta, SignsTransform
from polymask.train.fit import Listener, fit
from polymask.train.learn import Loaders
from polymask.train.learner import placed
from polymask.train.predict import evaluate, logits
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
        changes = {name: t.spread(t.alpha) * (2 * t.mask().to(t.alpha) - 1) for name, t in bits.items()}
    counts = [t.alpha.numel() for t in bits.values()]
    theta = torch.zeros(sum(counts), device=base.device, requires_grad=True)
    optimiser = torch.optim.Adam([theta], rate)
    listener.begin(replace(recipe, epochs=1), steps, 0)
    try:
        epochs = (train.batches(epoch) for epoch in count())
        placed_images = (placed(*batch, base, recipe)[0] for batches in epochs for batch in batches)
        with closing(placed_images) as images:
            for step, batch in enumerate(islice(images, steps)):
                optimiser.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
                weights = fixed | {
                    name: (base.tensor(name) + bits[name].spread(factor) * changes[name]).to(fixed[name].dtype)
                    for name, factor in zip(bits, torch.split(theta.exp(), counts), strict=True)
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
        for transform, factor in zip(bits.values(), torch.split(theta.exp(), counts), strict=True):
            transform.alpha.mul_(factor)


STEPS_TO_FLIP = 40  # of a weight of mean change


def started_at(base: Base, one_bit: Domain, tuned: Finetuned, recipe: Recipe) -> Domain:
    """A new `affine-full` domain whose weights, norms and head are the one-bit domain's.

    Its norms are its own, whatever the recipe says: they hold the checkpoint's. An affine mask
    has no bias, so changed biases are lost. Sizes a row give scalars a channel.
    """
    options = replace(recipe, norms=None).method_options("own")
    options["per"] = "channel" if cast(BitDelta, one_bit.method).per == "row" else "layer"
    domain = one_bit.rebuilt(base, create_method("affine-full", **options))
    found = dict(one_bit.named_transforms())
    with torch.no_grad():
        for name, transform in domain.named_transforms():
            bit = found[name]
            assert isinstance(transform, AffineTransform)
            assert isinstance(bit, SignsTransform)
            assert transform.scores is not None
            size = tuned.delta(base, name).abs()
            if not size.any():  # k2 = 0: the mask is free to begin anywhere
                continue
            scores = recipe.rate * (STEPS_TO_FLIP * size / size.mean()).clamp_min(1)
            transform.scores.copy_(torch.where(bit.mask(), scores, -scores))
            alpha = bit.alpha.view(transform.scalar_shape)
            transform.get_parameter("k1").copy_(-alpha)
            transform.get_parameter("k2").copy_(2 * alpha)
    return domain


def train_on(
    base: Base, domain: Domain, loaders: Loaders, recipe: Recipe, *, seed: int, listener: Listener | None = None
) -> tuple[Domain, float | None]:
    """Train a domain that knows something already; what is best on val, the start included.

    With it comes its accuracy on val in percent, None where training takes all images.
    """
    start = domain.frozen()
    recipe = replace(recipe, head_start=None)
    history = fit(base, domain, loaders.train, loaders.val, recipe, seed=seed, listener=listener)
    if loaders.val is None or recipe.selection == "last":
        return domain, history[-1].val_accuracy
    before, after = (evaluate(base, d, loaders.val) for d in (start, domain))
    return (domain, after) if after >= before else (start, before)
