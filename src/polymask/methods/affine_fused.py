"""Affine masks of all sites in one operation: one pass over memory each way.

Scores, base weights and packed masks of a domain lie in one buffer each, whose blocks belong to one
site each; the parameters are views of it. The first use moves them there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polymask.binarize import Surrogate
from polymask.bits import WORD
from polymask.kernels import compiled
from polymask.kernels.blocks import BLOCK, Plan, move_together, plan

if TYPE_CHECKING:
    from polymask.methods.affine import AffineTransform


def fused_weights(
    weights: Sequence[Tensor],
    transforms: "Sequence[AffineTransform]",
    out: Sequence[Tensor] | None = None,
) -> list[Tensor] | None:
    """W~ of every site; None where sites are not of a kind that can be done together.

    With `out`, memory that is there already, what learns is not for it: masks must be stored.
    """
    sizes = tuple(weight.numel() for weight in weights)
    if not sizes or not all(map(_suits, weights, transforms)):
        return None
    where = plan(sizes, BLOCK, weights[0].device)
    scores = [t.scores for t in transforms if t.scores is not None]
    if len(scores) == len(transforms) and out is None:
        return _learning(where, weights, scores, transforms)
    if scores or (torch.is_grad_enabled() and any(k.requires_grad for k in _learned(transforms))):
        return None
    return _stored(where, weights, transforms, out)


def _suits(weight: Tensor, transform: "AffineTransform") -> bool:
    learned = weight if transform.scores is None else transform.scores
    return (
        transform.scalar_count == 1
        and weight.dtype == learned.dtype == torch.float32
        and _is_dense(weight)
        and _is_dense(learned)
    )


def _is_dense(tensor: Tensor) -> bool:
    by_channels = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return by_channels or tensor.is_contiguous()


def _learning(
    where: Plan,
    weights: Sequence[Tensor],
    scores: Sequence[Tensor],
    transforms: "Sequence[AffineTransform]",
) -> list[Tensor]:
    first = transforms[0]
    aligned = all(w.stride() == r.stride() for w, r in zip(weights, scores, strict=True))
    W = where.whole(weights) if aligned else None
    R = where.whole(scores)
    job = _Job(
        where,
        move_together(where, weights, scores) if W is None else W,
        move_together(where, scores, scores) if R is None else R,
        _scalars(transforms, weights[0].device),
        _places(transforms),
        first.at,
        first.surrogate,
    )
    made: tuple[Tensor, ...] = _FusedAffine.apply(job, len(scores), *scores, *_learned(transforms))  # type: ignore[no-untyped-call]
    return list(made)


@torch.no_grad()
def _stored(
    where: Plan,
    weights: Sequence[Tensor],
    transforms: "Sequence[AffineTransform]",
    out: Sequence[Tensor] | None,
) -> list[Tensor] | None:
    by_rows = all(weight.is_contiguous() for weight in weights)
    target = where.buffer(torch.float32) if out is None else where.whole(out)
    words = [t.words for t in transforms if t.words is not None]
    if target is None:
        return None
    W = where.whole(weights) if by_rows else None
    if W is None:
        W = move_together(where, weights, [weight.contiguous() for weight in weights])
    packed = plan(tuple(w.numel() for w in words), BLOCK // WORD, words[0].device)
    bits = packed.whole(words)
    if bits is None:
        bits = move_together(packed, words, words)
    compiled.from_words(W, bits, _scalars(transforms, weights[0].device), where.owner, target)
    return where.pieces(target, weights) if out is None else list(out)


@dataclass(frozen=True)
class _Job:
    """One evaluation: buffers, scalars (sites, 4), and which of those are learned."""

    where: Plan
    W: Tensor
    R: Tensor
    K: Tensor
    learned: list[int]
    at: float
    surrogate: Surrogate


class _FusedAffine(torch.autograd.Function):
    """W~ of every site from the scores of every site, then the learned scalars."""

    @staticmethod
    def forward(ctx: Any, job: _Job, sites: int, *learned: Tensor) -> tuple[Tensor, ...]:
        scores = learned[:sites]
        ctx.job, ctx.shapes = job, [k.shape for k in learned[sites:]]
        ctx.save_for_backward(*scores)
        made = compiled.forward(job.W, job.R, job.K, job.where.owner, job.at)
        return tuple(job.where.pieces(made, scores))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        job: _Job = ctx.job
        scores = ctx.saved_tensors  # raises if they have changed since
        buffer = job.where.buffer(torch.float32)
        pieces = job.where.pieces(buffer, scores)
        torch._foreach_copy_(pieces, gradients)
        dK = compiled.backward(
            buffer, job.W, job.R, job.K, job.where.owner, job.at, job.surrogate
        ).view(-1)
        found = dK[job.learned].unbind() if job.learned else ()
        shaped = (dk.view(shape) for dk, shape in zip(found, ctx.shapes, strict=True))
        return (None, None, *pieces, *shaped)


def _learned(transforms: "Sequence[AffineTransform]") -> list[Tensor]:
    return [k for t in transforms for k in t.coefficients() if isinstance(k, Tensor)]


def _places(transforms: "Sequence[AffineTransform]") -> list[int]:
    """Where the learned scalars stand in K, row after row."""
    every = [k for t in transforms for k in t.coefficients()]
    return [place for place, k in enumerate(every) if isinstance(k, Tensor)]


@torch.no_grad()
def _scalars(transforms: "Sequence[AffineTransform]", device: torch.device) -> Tensor:
    """K, (sites, 4)."""
    every = [k for t in transforms for k in t.coefficients()]
    learned = [k.view(-1) for k in every if isinstance(k, Tensor)]
    numbers = torch.tensor([0.0 if isinstance(k, Tensor) else k for k in every], device=device)
    if learned:
        places = torch.tensor(_places(transforms), device=device)
        numbers.index_copy_(0, places, torch.cat(learned))
    return numbers.view(-1, 4)
