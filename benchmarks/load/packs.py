"""Domains like those that `learn` leaves, without learning."""

import torch

import polymask as pm
from polymask.core.accounting import in_halves

METHODS = {"affine-centred": 0.5, "affine-full": 0.36}  # with the density of masks


def as_learned(base: pm.Base, classes: int, method: str = "affine-centred", seed: int = 0) -> pm.Domain:
    """A domain with random masks of the usual density and numbers of 16 bits, on the base's statistics of norms."""
    torch.manual_seed(seed)
    domain = pm.new_domain(base, method, [f"class {i}" for i in range(classes)], norms="affine")
    with torch.no_grad():
        for _, transform in domain.named_transforms():
            transform.scores.copy_(torch.rand_like(transform.scores) - 1 + METHODS[method])
    return domain.restore(in_halves(domain))
