"""The formula over all sites at once, in one pass over memory each way, by torch.compile.

The arithmetic of `kernels` over all sites at once, in one pass over memory, by torch.compile.

Weights W and scores R are buffers (blocks, 1024), K (sites, 4) the scalars, `owner` (blocks,) says
which site a block belongs to. Values are those of eager kernels to the bit; gradients differ in rounding.

Affine masks of all sites in one operation: one pass over memory each way.

Scores, base weights and packed masks of a domain lie in one buffer each, whose blocks belong to one
site each; the parameters are views of it. The first use moves them there. W~ has a buffer too, and
once the convolutions' gradients are there, those of the scores are made in the same memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polymask.core.bits import WORD, Surrogate, threshold
from polymask.core.merge import BLOCK, KeptMemory, Plan, copy_together, kept_memory, move_together, plan
from polymask.methods.affine.formula import affine

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.methods.affine.method import AffineTransform


@torch.no_grad()
def forward_all(W: Tensor, R: Tensor, K: Tensor, owner: Tensor, at: float, out: Tensor) -> None:
    """Write W~ of thresholded scores to `out`."""
    _run(_forward, W, R, K, owner, _number(at, R), out)


@torch.no_grad()
def backward_all(G: Tensor, W: Tensor, R: Tensor, K: Tensor, owner: Tensor, at: float, surrogate: Surrogate) -> Tensor:
    """Turn G = dE/dW~ into the gradient of the scores, in place; give that of K."""
    sums = _run(_backward, G, W, R, K, owner, _number(at, R), surrogate)
    return torch.zeros_like(K).index_add_(0, owner, sums)


@torch.no_grad()
def from_words_all(W: Tensor, words: Tensor, K: Tensor, owner: Tensor, out: Tensor) -> None:
    """Write W~ of packed masks, (blocks, 32) words, to `out`."""
    _run(_from_words, W, words, K, owner, out)


def _forward(W: Tensor, R: Tensor, K: Tensor, owner: Tensor, at: Tensor, out: Tensor) -> None:
    out.copy_(affine(W, threshold(R, at), *K[owner].unsqueeze(2).unbind(1)))


def _backward(G: Tensor, W: Tensor, R: Tensor, K: Tensor, owner: Tensor, at: Tensor, surrogate: Surrogate) -> Tensor:
    _, _, k2, k3 = K[owner].unsqueeze(2).unbind(1)
    GW, M = G * W, threshold(R, at).to(G.dtype)
    sums = torch.stack([part.sum(1) for part in (GW, G, G * M, GW * M)], 1)
    dR = GW * k3 + G * k2
    if surrogate == "sigmoid":
        slope = torch.sigmoid(R - at)
        dR = dR * slope * (1 - slope)
    G.copy_(dR)
    return sums


def _from_words(W: Tensor, words: Tensor, K: Tensor, owner: Tensor, out: Tensor) -> None:
    places = torch.arange(WORD, dtype=torch.int32, device=words.device)
    M = ((words.unsqueeze(2) >> places) & 1).bool()
    ks = K[owner].unsqueeze(2).unsqueeze(3).unbind(1)
    out.copy_(affine(W.view(M.shape), M, *ks).view(W.shape))


def _run(function: Callable[..., Any], *inputs: Any) -> Any:
    # One kernel for all networks: the number of blocks and of sites is left open.
    for tensor in inputs:
        if isinstance(tensor, Tensor) and tensor.ndim:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled(function)(*inputs)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def _number(value: float, like: Tensor) -> Tensor:
    # A plain float would be compiled in, and every new value compiled anew.
    return _tensor(value, like.dtype, like.device)


@cache
def _tensor(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def fused_weights(
    base: "Base",
    transforms: "Mapping[str, AffineTransform]",
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """W~ of every site; none where sites are not of a kind that can be done together.

    With `out`, memory that is there already, what learns is not for it: masks must be stored.
    """
    parts = list(transforms.values())
    weights = [base.tensor(name) for name in transforms]
    if not parts or not all(map(_suits, weights, parts)):
        return {}
    where = plan(tuple(weight.numel() for weight in weights), BLOCK, weights[0].device)
    scores = [t.scores for t in parts if t.scores is not None]
    ks = _Scalars(parts, weights[0].device)
    if len(scores) == len(parts) and out is None:
        W = _together(where, base, transforms, scores)
        made = _learning(where, W, scores, ks, parts[0])
        return dict(zip(transforms, made, strict=True))
    if scores or ks.learn:
        return {}
    if out is None:
        target: Tensor | None = where.buffer(torch.float32)
    else:
        target = where.whole([out[name] for name in transforms])
    if target is None:
        return {}
    by_rows = [weight.contiguous() for weight in weights]
    W = _together(where, base, transforms, by_rows)
    _write(W, [t.words for t in parts if t.words is not None], ks.matrix, where, target)
    if out is not None:
        return {name: out[name] for name in transforms}
    return dict(zip(transforms, where.pieces(target, by_rows), strict=True))


def _suits(weight: Tensor, transform: "AffineTransform") -> bool:
    scores = transform.scores
    learned = weight if scores is None else scores
    return (
        transform.scalar_count == 1
        and weight.dtype == learned.dtype == torch.float32
        and _is_dense(weight)
        and _is_dense(learned)
    )


def _is_dense(tensor: Tensor) -> bool:
    by_channels = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return by_channels or tensor.is_contiguous()


def _together(where: Plan, base: "Base", names: Iterable[str], like: Sequence[Tensor]) -> Tensor:
    """The base's weights as one buffer, laid out as `like`; from now on they are views of it."""
    weights = [base.tensor(name) for name in names]
    aligned = all(w.stride() == t.stride() for w, t in zip(weights, like, strict=True))
    found = where.whole(weights) if aligned else None
    if found is None:
        found, pieces = copy_together(where, weights, like)
        base.relocate(dict(zip(names, pieces, strict=True)))
    return found


def _learning(
    where: Plan, W: Tensor, scores: Sequence[Tensor], ks: "_Scalars", first: "AffineTransform"
) -> tuple[Tensor, ...]:
    R = where.whole(scores)
    job = _Job(
        where,
        W,
        move_together(where, scores) if R is None else R,
        ks,
        first.at,
        first.surrogate,
        # Merged networks, which nothing is learned from, may be kept for long.
        kept_memory(first) if torch.is_grad_enabled() else None,
    )
    made: tuple[Tensor, ...] = _FusedAffine.apply(job, len(scores), *scores, *ks.learned)  # type: ignore[no-untyped-call]
    return made


@torch.no_grad()
def _write(W: Tensor, words: Sequence[Tensor], K: Tensor, where: Plan, out: Tensor) -> None:
    """W~ of packed masks, which are moved together if they are not yet."""
    packed = plan(tuple(w.numel() for w in words), BLOCK // WORD, W.device)
    bits = packed.whole(words)
    if bits is None:
        bits = move_together(packed, words)
    from_words_all(W, bits, K, where.owner, out)


@dataclass(frozen=True)
class _Job:
    """One evaluation: buffers and scalars of all sites, and memory for what is made."""

    where: Plan
    W: Tensor
    R: Tensor
    ks: "_Scalars"
    at: float
    surrogate: Surrogate
    memory: KeptMemory | None


class _FusedAffine(torch.autograd.Function):
    """W~ of every site from the scores of every site, then the learned scalars."""

    @staticmethod
    def forward(ctx: Any, job: _Job, sites: int, *learned: Tensor) -> tuple[Tensor, ...]:
        scores = learned[:sites]
        ctx.job, ctx.shapes = job, [k.shape for k in learned[sites:]]
        ctx.save_for_backward(*scores)
        made = job.where.buffer(torch.float32, job.memory)
        forward_all(job.W, job.R, job.ks.matrix, job.where.owner, job.at, made)
        return tuple(job.where.pieces(made, scores))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        job: _Job = ctx.job
        scores = ctx.saved_tensors  # raises if they have changed since
        buffer = job.where.buffer(torch.float32, job.memory)  # W~ is not needed any more
        pieces = job.where.pieces(buffer, scores)
        torch._foreach_copy_(pieces, gradients)
        dK = backward_all(buffer, job.W, job.R, job.ks.matrix, job.where.owner, job.at, job.surrogate).view(-1)
        found = dK[job.ks.places].unbind() if job.ks.places else ()
        shaped = (dk.view(shape) for dk, shape in zip(found, ctx.shapes, strict=True))
        return (None, None, *pieces, *shaped)


class _Scalars:
    """The scalars of all sites: K (sites, 4), and which of them are learned."""

    def __init__(self, transforms: "Sequence[AffineTransform]", device: torch.device) -> None:
        every = [k for t in transforms for k in t.coefficients()]
        self.places = [place for place, k in enumerate(every) if isinstance(k, Tensor)]
        self.learned = [k for k in every if isinstance(k, Tensor)]
        numbers = torch.tensor([0.0 if isinstance(k, Tensor) else k for k in every], device=device)
        if self.learned:
            with torch.no_grad():
                places = torch.tensor(self.places, device=device)
                alike = len({k.ndim for k in self.learned}) == 1  # many views take their time
                parts = self.learned if alike else [k.view(-1) for k in self.learned]
                numbers.index_copy_(0, places, torch.cat(parts).view(-1))
        self.matrix = numbers.view(-1, 4)

    @property
    def learn(self) -> bool:
        """Whether gradients are wanted."""
        return torch.is_grad_enabled() and any(k.requires_grad for k in self.learned)
