"""Affine masks that go on learning from where a one-bit domain stands.

    k0 = 1,  k1 = -α,  k2 = 2α,  k3 = 0,        R = ±r max(1, 40 |Δ| / mean |Δ|),  + where M = 1

gives W~ of the one-bit domain to the bit. r is the rate of the masks. A step of Adam moves a score
by about r whatever its gradient, so a weight whose fine-tuning moved it as far as the mean flips
after some 40 steps that all ask for it, and one that hardly moved, of which the sign says least,
after one. Scores of a fresh domain are one or two steps from the threshold: in noise alone half of
the signs would be lost before the gradients mean anything.
"""

from dataclasses import replace

import torch

from polymask.conversion.finetuned import Finetuned
from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.registry import create_method
from polymask.methods.affine.method import AffineTransform
from polymask.methods.bitdelta import SignsTransform
from polymask.train.fit import Listener, fit
from polymask.train.learn import Loaders
from polymask.train.predict import evaluate
from polymask.train.recipe import Recipe

STEPS_TO_FLIP = 40  # of a weight of mean change


def started_at(base: Base, one_bit: Domain, tuned: Finetuned, recipe: Recipe) -> Domain:
    """A new `affine-full` domain whose weights, norms and head are the one-bit domain's.

    Its norms are its own, whatever the recipe says: they hold the checkpoint's. An affine mask
    has no bias, so changed biases are lost.
    """
    options = replace(recipe, norms=None).method_options("own")
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
            transform.get_parameter("k1").fill_(-bit.alpha.item())
            transform.get_parameter("k2").fill_(2 * bit.alpha.item())
    return domain


def train_on(
    base: Base,
    domain: Domain,
    loaders: Loaders,
    recipe: Recipe,
    *,
    seed: int,
    listener: Listener | None = None,
) -> tuple[Domain, float | None]:
    """Train a domain that knows something already; what is best on val, the start included.

    With it comes its accuracy on val in percent, None where training takes all images.
    """
    start = domain.frozen()
    history = fit(base, domain, loaders.train, loaders.val, recipe, seed=seed, listener=listener)
    if loaders.val is None or recipe.selection == "last":
        return domain, history[-1].val_accuracy
    before, after = (evaluate(base, d, loaders.val) for d in (start, domain))
    return (domain, after) if after >= before else (start, before)
