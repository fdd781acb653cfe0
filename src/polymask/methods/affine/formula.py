"""The paper's formula: what an affine mask makes of a site's weights; and the kernels that compute it.

    W~ = k0 W + k1 1 + k2 M + k3 W∘M,        M = 1[R >= t]

For one weight w it is a choice between two affine maps of it: k0 w + k1, and (k0 + k3) w + (k1 + k2) where the mask is
on. With G = dE/dW~ the gradients are

    dk0 = <G, W>   dk1 = <G, 1>   dk2 = <G, M>   dk3 = <G, W∘M>
    dR = h~'(R) (k2 + k3 W) G

where h~ is the surrogate of the threshold. `affine` is the one statement of it: all kernels, of learned and of stored
masks, are tested against it and what autograd makes of it.

The kernels for one site, here, go over a block of weights at a time. Whole tensors would go through memory once for
every operation, and into fresh pages each time; a block of them stays in the cache. Matrices are (rows, columns): a row
for each set of scalars, so one where a layer shares them. The scalars are (rows, 1). Those for all sites at once are in
`compiled`.

The choice of kernels is one setting for the whole process, since it is about the machine and not about a domain:
"eager", the default, "compiled", or "auto", eager until compiled ones are there. A run, its checkpoints and packs do
not depend on it. The environment variable `POLYMASK_KERNELS` sets it for programs that do not, and for the processes
they start.
"""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polymask.core.bits import Surrogate, scale_by_surrogate, unpack_octets
from polymask.core.survey import learned_type
from polymask.errors import PolymaskError

BLOCK = 1 << 18  # weights for each thread


def affine(
    W: Tensor, M: Tensor, k0: Tensor | float, k1: Tensor | float, k2: Tensor | float, k3: Tensor | float
) -> Tensor:
    """(k0 + k3 M) W + (k1 + k2 M), in W's type; M is boolean, or zeros and ones that have a gradient."""
    M = M.to(learned_type(W.dtype))
    return ((k0 + k3 * M) * W + (k1 + k2 * M)).to(W.dtype)


def forward(W: Tensor, R: Tensor, ks: Sequence[Tensor], at: float) -> Tensor:
    """W~ of thresholded scores R; in W's type."""
    out = torch.empty_like(W)
    for w, r, target, *k in _blocks(W, R, out, *ks):
        _map(w, _mask(r, at), k, target)
    return out


def backward(
    G: Tensor,
    W: Tensor,
    R: Tensor,
    ks: Sequence[Tensor],
    at: float,
    surrogate: Surrogate,
    wanted: Sequence[bool],
    dR: Tensor,
) -> list[Tensor | None]:
    """The gradients of those scalars that are wanted, from G = dE/dW~; that of the scores in dR, which may be G."""
    sums: list[list[Tensor]] = [[], [], [], []]
    for g, w, r, target, *k in _blocks(G, W, R, dR, *ks):
        g = g.to(r.dtype)
        gw = g * w
        masked = _mask(r, at) if wanted[2] or wanted[3] else None
        for i, full in enumerate((gw, g, g, gw)):
            if wanted[i]:
                sums[i].append(_row_sums(full, masked if i in (2, 3) else None))
        torch.addcmul(gw.mul_(k[3]), g, k[2], out=target)
        scale_by_surrogate(target, r, at, surrogate)
    return [_joined(parts, W.shape[0]) if parts else None for parts in sums]


def from_words(W: Tensor, words: Tensor, ks: Sequence[Tensor], out: Tensor) -> None:
    """Write W~ of a packed mask (32 bits to a word, row after row) to `out`."""
    octets = words.view(torch.uint8)
    done, M = 0, W.new_empty(0, dtype=ks[0].dtype)
    for w, target, *k in _blocks(W, out, *ks):
        first, last = done // 8, -(-(done + w.numel()) // 8)
        found = unpack_octets(octets[first:last])
        begin = done - 8 * first
        # All blocks but the last are of one size, and take the same memory.
        M = M if M.shape == w.shape else torch.empty_like(w, dtype=ks[0].dtype)
        M.copy_(found[begin : begin + w.numel()].view(w.shape))
        _map(w, M, k, target)
        done += w.numel()


_EIGHT = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32)


class _Scratch(threading.local):
    """Memory of each thread for what is between a table and W~; made once, since fresh pages take long to clear."""

    def __init__(self) -> None:
        self.places, self.shifts = np.empty(BLOCK // 8, np.intp), np.empty((BLOCK // 8, 8), np.float32)


_scratch = _Scratch()


class Tables:
    """W~ of packed masks for several sites, each with one set of scalars, in single precision on the CPU.

    An octet of a mask stands for eight scales k0 + k3 M and eight shifts k1 + k2 M, and a site's two tables have them
    for all 256. So bits become numbers without ever being bits one by one. Each step rounds as `affine` does.
    """

    def __init__(self, scalars: Sequence[Sequence[float]]) -> None:
        K = np.array(scalars, np.float32).reshape(-1, 4, 1, 1)
        with np.errstate(all="ignore"):
            self.scales, self.shifts = (K[:, i] + K[:, j] * _EIGHT for i, j in ((0, 3), (1, 2)))

    def write(self, site: int, W: Tensor, words: Tensor, out: Tensor) -> None:
        """W~ of one of the sites, in memory that is there already."""
        scale, shift = self.scales[site], self.shifts[site]
        weights, target = W.detach().view(-1).numpy(), out.detach().view(-1).numpy()
        octets, whole = words.numpy().view(np.uint8), len(weights) // 8
        rows, made = weights[: 8 * whole].reshape(-1, 8), target[: 8 * whole].reshape(-1, 8)
        with np.errstate(all="ignore"):
            for begin in range(0, whole, BLOCK // 8):
                into, w = made[begin : begin + BLOCK // 8], rows[begin : begin + BLOCK // 8]
                places, shifts = _scratch.places[: len(w)], _scratch.shifts[: len(w)]
                places[:] = octets[begin : begin + len(w)]
                # An octet is never out of bounds, and "wrap" finds that out soonest.
                np.multiply(scale.take(places, 0, into, "wrap"), w, into)
                np.add(into, shift.take(places, 0, shifts, "wrap"), into)
            if left := len(weights) - 8 * whole:
                row = octets[whole]
                target[-left:] = scale[row, :left] * weights[-left:] + shift[row, :left]

    @staticmethod
    def suit(*tensors: Tensor) -> bool:
        """Whether weights and memory for W~ are of the kind that tables are for."""
        plain = all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
        return plain and not torch.compiler.is_compiling()


def _map(W: Tensor, M: Tensor, ks: Sequence[Tensor], out: Tensor) -> None:
    """Write W~ to `out`, which is not W's memory; M is used up."""
    k0, k1, k2, k3 = ks
    # A plain number saves a pass; on a GPU it would have to be waited for.
    plain = len(k3) == 1 and M.device.type == "cpu" and not torch.compiler.is_compiling()
    if plain and W.dtype == M.dtype == out.dtype:
        torch.add(k0, M, alpha=k3.item(), out=out).mul_(W)
        out.add_(torch.add(k1, M, alpha=k2.item(), out=M))
        return
    scale = torch.mul(M, k3).add_(k0)
    torch.add(scale.mul_(W), M.mul_(k2).add_(k1), out=out)


def _mask(R: Tensor, at: float) -> Tensor:
    """1[R >= t] as numbers; comparing into them is faster than turning booleans into them."""
    return torch.ge(R, at, out=torch.empty_like(R))


def _row_sums(values: Tensor, mask: Tensor | None) -> Tensor:
    if len(values) > 1:
        return (values if mask is None else values * mask).sum(1, keepdim=True)
    flat = values.view(-1)
    total = flat.sum() if mask is None else torch.dot(flat, mask.view(-1))
    return total.view(1, 1)


def _joined(parts: list[Tensor], rows: int) -> Tensor:
    """Sums of blocks as sums of rows: blocks are pieces of one row, or several rows each."""
    joined = torch.cat(parts)
    return joined.sum(0, keepdim=True) if rows == 1 else joined


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matrices and scalars, a block at a time; the first is a matrix."""
    first = tensors[0]
    rows, columns = first.shape
    # A compiler, and a GPU, want all of it at once.
    if first.device.type != "cpu" or torch.compiler.is_compiling():
        return iter([tensors])
    size = BLOCK * torch.get_num_threads()
    if first.numel() <= size:
        return iter([tensors])
    if rows == 1:
        count = -(-columns // size)
        pieces = (torch.split(t, size, 1) if t.shape[1] > 1 else [t] * count for t in tensors)
    else:
        pieces = (torch.split(t, max(1, size // columns)) for t in tensors)
    return zip(*pieces, strict=True)


class Matrices:
    """How tensors of one shape become (rows, columns), and back.

    Where memory is laid out as `like` has it, nothing is copied: channels last stays channels last.
    `scalar_shape` broadcasts over the shape and says what shares one set of scalars.
    """

    def __init__(self, like: Tensor, scalar_shape: tuple[int, ...]) -> None:
        split = [d for d, size in enumerate(scalar_shape) if size > 1]
        shared = [d for d in range(like.ndim) if d not in split]
        self.rows = prod(scalar_shape)
        self.order = split + sorted(shared, key=like.stride, reverse=True)
        self.sizes = [like.shape[d] for d in self.order]

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor is laid out so that its matrix is a view."""
        return tensor.permute(self.order).is_contiguous()

    def matrix(self, tensor: Tensor) -> Tensor:
        """(rows, columns)."""
        return tensor.permute(self.order).reshape(self.rows, -1)

    def tensor(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`; a view."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return matrix.view(self.sizes).permute(back)

    def column(self, scalar: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Scalars as (rows, 1); a fixed one is the same in each row."""
        if isinstance(scalar, Tensor):
            return scalar.detach().reshape(self.rows, 1)
        return torch.full((self.rows, 1), scalar, dtype=dtype, device=device)


class AffineMask(torch.autograd.Function):
    """The formula for thresholded scores; keeps nothing for backward but its inputs."""

    @staticmethod
    def forward(  # with its context: without, torch inspects its signature at every call
        ctx: Any,
        W: Tensor,
        scores: Tensor,
        k0: Tensor | float,
        k1: Tensor | float,
        k2: Tensor | float,
        k3: Tensor | float,
        at: float,
        surrogate: Surrogate,
    ) -> Tensor:
        ks = (k0, k1, k2, k3)
        shape = Matrices(scores, _scalar_shape(ks, scores.ndim))
        columns = [shape.column(k, scores.dtype, scores.device) for k in ks]
        ctx.at, ctx.surrogate = at, surrogate
        ctx.fixed = [None if isinstance(k, Tensor) else k for k in ks]
        ctx.save_for_backward(W, scores, *(k for k in ks if isinstance(k, Tensor)))
        return shape.tensor(forward(shape.matrix(W), shape.matrix(scores), columns, at))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor | None, ...]:
        W, scores, *learned = ctx.saved_tensors
        ks = [learned.pop(0) if k is None else k for k in ctx.fixed]
        shape = Matrices(scores, _scalar_shape(ks, scores.ndim))
        _, _, *wanted = ctx.needs_input_grad[:6]
        columns = [shape.column(k, scores.dtype, scores.device) for k in ks]
        W, R = shape.matrix(W), shape.matrix(scores)
        dR = torch.empty_like(R)
        if not shape.fits(G):  # laid out otherwise, as convolutions on images by channels give it
            shape.tensor(dR).copy_(G)
        G = shape.matrix(G) if shape.fits(G) else dR
        dks = backward(G, W, R, columns, ctx.at, ctx.surrogate, wanted, dR)
        shaped = (None if dk is None else dk.view(k.shape) for k, dk in zip(ks, dks, strict=True))
        return (None, shape.tensor(dR), *shaped, None, None)


def _scalar_shape(ks: Sequence[Tensor | float], dimensions: int) -> tuple[int, ...]:
    """The shape of the scalars that are learned; one number where none is."""
    shapes = [tuple(k.shape) for k in ks if isinstance(k, Tensor) and k.numel() > 1]
    return shapes[0] if shapes else (1,) * dimensions


KINDS = ("eager", "compiled", "auto")
VARIABLE = "POLYMASK_KERNELS"
LOG = logging.getLogger("polymask")

_chosen: str | None = None
_choice = 0  # how often something was chosen


def set_kernels(kind: str) -> str:
    """Choose "eager" or "compiled" kernels; what is in use from now on.

    "compiled" is by torch.compile, which needs a C++ compiler and takes some seconds at first. Where it does not work,
    a notice says so and the kernels are eager. "auto", for inference, is eager at once, and compiled as soon as a
    thread aside has compiled what inference needs, if it can: nothing waits for it. Weights are the same to
    the bit; gradients of compiled kernels differ in rounding. The base's weights are moved into one buffer when they
    are first used, so a network that shared its memory with it no longer does.
    """
    global _chosen, _choice
    if kind not in KINDS:
        raise PolymaskError(f"kernels {kind!r} are not known; they are {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    _choice += 1
    if kind == "auto":
        threading.Thread(target=_compile_aside, args=(_choice,), name="polymask-compile", daemon=True).start()
        kind = "eager"
    if kind == "compiled" and (reason := _trouble()) is not None:
        LOG.warning("kernels cannot be compiled here (%s); eager ones are used", reason)
        kind = "eager"
    _chosen = kind
    return kind


def compiled_kernels() -> bool:
    """Whether compiled kernels are in use."""
    if torch.compiler.is_compiling():  # on the whole network: it takes plain operations in
        return False
    if _chosen is None:
        set_kernels(os.environ.get(VARIABLE) or "eager")
    return _chosen == "compiled"


def _compile_aside(choice: int) -> None:
    """Compile what inference needs, and use it from then on unless something was chosen meanwhile."""
    global _chosen
    from polymask.methods.affine.compiled import try_inference

    try:  # not with a lower priority: it would keep all other threads waiting for Python's lock
        try_inference()
    except (RuntimeError, OSError) as error:
        LOG.info("kernels cannot be compiled here (%s); eager ones are used", str(error).strip().partition("\n")[0])
        return
    if _choice == choice:
        _chosen = "compiled"


@cache
def _trouble() -> str | None:
    """Why kernels cannot be compiled, in one line; None where they can."""
    from polymask.methods.affine.compiled import try_kernel

    try:
        try_kernel()
    except (RuntimeError, OSError) as error:  # of torch.compile, its compiler and its files
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return None
