"""Which domain an image belongs to, told from what every domain says of it.

    score(image, domain) = log Σ_c exp(logit_c)

the negative free energy of the domain's logits. A network answers images like those that it
learned from with large logits, and others with small ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from polymask.serve.engine import Answer


@dataclass(frozen=True)
class Ranked:
    """One domain's score for one image, larger is better."""

    answer: Answer
    score: float


def rank(answers: Sequence[Answer]) -> list[list[Ranked]]:
    """For every image the domains, the likeliest first; equal scores in order of names."""
    scores = [score(answer.logits).tolist() for answer in answers]
    rankings = []
    for image in range(len(scores[0])):
        row = [Ranked(answer, found[image]) for answer, found in zip(answers, scores, strict=True)]
        rankings.append(sorted(row, key=lambda one: (-one.score, one.answer.entry.name)))
    return rankings


def score(logits: Tensor) -> Tensor:
    """(N,) of logits (N, classes)."""
    return logits.logsumexp(1)
