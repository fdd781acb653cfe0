"""The formula over all sites at once, in one pass over memory each way, by torch.compile.

Base weights W, scores R and packed masks of a domain lie in one buffer (blocks, 1024) each, whose blocks belong to one
site each: `owner` (blocks,) says to which, and K (sites, 4) has the scalars. The parameters are views of the buffer;
the first use moves them there. W~ has a buffer too, and once the convolutions' gradients are there, those of the scores
are made in the same memory. Values are those of eager kernels to the bit; gradients differ in rounding.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polymask.core.bits import WORD, Surrogate, scale_by_surrogate, threshold
from polymask.core.merge import (
    BLOCK,
    BufferPlan,
    ReusedMemory,
    copy_together,
    move_together,
    plan_buffer,
    reused_memory,
)
from polymask.methods.affine.formula import affine

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.methods.affine.method import AffineTransform


def _forward(W: Tensor, R: Tensor, K: Tensor, owner: Tensor, at: Tensor, out: Tensor) -> None:
    """Write W~ of thresholded scores to `out`."""
    out.copy_(affine(W, threshold(R, at), *K[owner].unsqueeze(2).unbind(1)))


def _backward(G: Tensor, W: Tensor, R: Tensor, K: Tensor, owner: Tensor, at: Tensor, surrogate: Surrogate) -> Tensor:
    """Turn G = dE/dW~ into the gradient of the scores, in place; give that of K, block by block."""
    _, _, k2, k3 = K[owner].unsqueeze(2).unbind(1)
    GW, M = G * W, threshold(R, at).to(G.dtype)
    sums = torch.stack([part.sum(1) for part in (GW, G, G * M, GW * M)], 1)
    G.copy_(scale_by_surrogate(GW * k3 + G * k2, R, at, surrogate))
    return sums


def _from_words(W: Tensor, words: Tensor, K: Tensor, owner: Tensor, out: Tensor) -> None:
    """Write W~ of packed masks, (blocks, 32) words, to `out`."""
    places = torch.arange(WORD, dtype=torch.int32, device=words.device)
    M = ((words.unsqueeze(2) >> places) & 1).bool()
    ks = K[owner].unsqueeze(2).unsqueeze(3).unbind(1)
    out.copy_(affine(W.view(M.shape), M, *ks).view(W.shape))


def try_kernel() -> None:
    """Compile one kernel, and run it; raises where that does not work."""
    W, R, out = (torch.ones(64, 1024) for _ in range(3))
    _run(_forward, W, R, torch.ones(2, 4), torch.arange(64) // 32, torch.tensor(0.0), out)


@torch.no_grad()
def try_inference() -> None:
    """Compile the kernel for stored masks, for networks of any size; raises where that does not work."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # others would be processes that stay
    for blocks, sites in ((64, 2), (96, 3)):
        W, out = torch.ones(blocks, BLOCK), torch.empty(blocks, BLOCK)
        words, owner = torch.zeros(blocks, BLOCK // WORD, dtype=torch.int32), torch.arange(blocks) % sites
        _run(_from_words, W, words, torch.ones(sites, 4), owner, out)


def _run(function: Callable[..., Any], *inputs: Any) -> Any:
    # One kernel for all networks: the number of blocks and of sites is left open.
    for tensor in inputs:
        if isinstance(tensor, Tensor) and tensor.ndim:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled(function)(*inputs)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


@cache
def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A plain float would be compiled in, and compiled again for every new value.
    return torch.tensor(value, dtype=dtype, device=device)


def fused_weights(
    base: "Base", transforms: "Mapping[str, AffineTransform]", out: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """W~ of every site; none where sites are not of a kind that can be done together.

    With `out`, memory that is there already, what learns is not for it: masks must be stored.
    """
    parts = list(transforms.values())
    weights = [base.tensor(name) for name in transforms]
    if not parts or not all(map(_suits, weights, parts)):
        return {}
    where = plan_buffer(tuple(weight.numel() for weight in weights), BLOCK, weights[0].device)
    scores = [t.scores for t in parts if t.scores is not None]
    ks = _Scalars(parts, weights[0].device)
    if len(scores) == len(parts) and out is None:
        W = _together(where, base, transforms, scores)
        made = _learning(where, W, scores, ks, parts[0])
        return dict(zip(transforms, made, strict=True))
    if scores or ks.learn:
        return {}
    target = where.buffer(torch.float32) if out is None else where.whole([out[name] for name in transforms])
    if target is None:
        return {}
    by_rows = [weight.contiguous() for weight in weights]
    W = _together(where, base, transforms, by_rows)
    _write(W, [t.words for t in parts if t.words is not None], ks.matrix, where, target)
    if out is not None:
        return {name: out[name] for name in transforms}
    return dict(zip(transforms, where.pieces(target, by_rows), strict=True))


def _suits(weight: Tensor, transform: "AffineTransform") -> bool:
    tensors = [weight] if transform.scores is None else [weight, transform.scores]
    return transform.scalar_count == 1 and all(t.dtype == torch.float32 and _is_dense(t) for t in tensors)


def _is_dense(tensor: Tensor) -> bool:
    by_channels = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return by_channels or tensor.is_contiguous()


def _together(where: BufferPlan, base: "Base", names: Iterable[str], like: Sequence[Tensor]) -> Tensor:
    """The base's weights as one buffer, laid out as `like`; from now on they are views of it."""
    weights = [base.tensor(name) for name in names]
    aligned = all(w.stride() == t.stride() for w, t in zip(weights, like, strict=True))
    found = where.whole(weights) if aligned else None
    if found is None:
        found, pieces = copy_together(where, weights, like)
        base.relocate(dict(zip(names, pieces, strict=True)))
    return found


def _learning(
    where: BufferPlan, W: Tensor, scores: Sequence[Tensor], ks: "_Scalars", first: "AffineTransform"
) -> tuple[Tensor, ...]:
    R = where.whole(scores)
    R = move_together(where, scores) if R is None else R
    # Merged networks, which nothing is learned from, may be kept for long.
    memory = reused_memory(first) if torch.is_grad_enabled() else None
    job = _Job(where, W, R, ks, _number(first.at, R.dtype, R.device), first.surrogate, memory)
    made: tuple[Tensor, ...] = _FusedAffine.apply(job, len(scores), *scores, *ks.learned)  # type: ignore[no-untyped-call]
    return made


@torch.no_grad()
def _write(W: Tensor, words: Sequence[Tensor], K: Tensor, where: BufferPlan, out: Tensor) -> None:
    """W~ of packed masks, which are moved together if they are not yet."""
    packed = plan_buffer(tuple(w.numel() for w in words), BLOCK // WORD, W.device)
    bits = packed.whole(words)
    if bits is None:
        bits = move_together(packed, words)
    _run(_from_words, W, bits, K, where.owner, out)


@dataclass(frozen=True)
class _Job:
    """One evaluation: buffers and scalars of all sites, and memory for what is made."""

    where: BufferPlan
    W: Tensor
    R: Tensor
    ks: "_Scalars"
    at: Tensor
    surrogate: Surrogate
    memory: ReusedMemory | None


class _FusedAffine(torch.autograd.Function):
    """W~ of every site from the scores of every site, then the learned scalars."""

    @staticmethod
    def forward(ctx: Any, job: _Job, sites: int, *learned: Tensor) -> tuple[Tensor, ...]:
        scores = learned[:sites]
        ctx.job, ctx.shapes = job, [k.shape for k in learned[sites:]]
        ctx.save_for_backward(*scores)
        made = job.where.buffer(torch.float32, job.memory)
        _run(_forward, job.W, job.R, job.ks.matrix, job.where.owner, job.at, made)
        return tuple(job.where.pieces(made, scores))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        job: _Job = ctx.job
        scores = ctx.saved_tensors  # raises if they have changed since
        buffer = job.where.buffer(torch.float32, job.memory)  # W~ is not needed any more
        pieces = job.where.pieces(buffer, scores)
        torch._foreach_copy_(pieces, gradients)
        owner, K = job.where.owner, job.ks.matrix
        sums = _run(_backward, buffer, job.W, job.R, K, owner, job.at, job.surrogate)
        dK = torch.zeros_like(K).index_add_(0, owner, sums).view(-1)
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
