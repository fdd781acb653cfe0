"""Which domain an image belongs to.

Where every domain that is compared has a likeness in its pack, by the base's own feature f(image):

    score(image, domain) = cos(f(image), likeness of the domain)

one run of the base, however many domains there are. Otherwise every domain's network is run, and

    score(image, domain) = log sum_c exp(logit_c)

which is weaker: how large a network's logits are depends on much besides the image. Measured by
benchmarks/auto_domain.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polymask.serve.library import Entry
from polymask.train.likeness import fit

Rule = Literal["likeness", "logits"]


@dataclass(frozen=True)
class Ranked:
    """One domain's score for one image, larger is better."""

    entry: Entry
    score: float


def rank(entries: Sequence[Entry], scores: Tensor) -> list[list[Ranked]]:
    """For every image the domains, the likeliest first, of scores (N, domains).

    Equal scores stay in the order of `entries`.
    """
    orders = scores.argsort(dim=1, descending=True, stable=True).tolist()
    return [
        [Ranked(entries[place], float(row[place])) for place in order]
        for order, row in zip(orders, scores.tolist(), strict=True)
    ]


def by_likeness(features: Tensor, entries: Sequence[Entry]) -> Tensor:
    """Scores (N, domains) of the base's features (N, size)."""
    likenesses = [entry.likeness for entry in entries if entry.likeness is not None]
    return fit(features, torch.stack(likenesses))


def by_logits(logits: Sequence[Tensor]) -> Tensor:
    """Scores (N, domains) of what each domain says, (N, its classes)."""
    return torch.stack([one.logsumexp(1) for one in logits], 1)
