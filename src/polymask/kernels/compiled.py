"""The same arithmetic as `eager`, in one pass over memory each, by torch.compile.

Sizes are left open when a kernel is compiled, so one serves all sites. Values are those of `eager`
to the bit; gradients differ in rounding, as sums are taken in another order.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from polymask.binarize import Surrogate, threshold
from polymask.bits import WORD
from polymask.kernels import eager


@torch.no_grad()
def forward(W: Tensor, R: Tensor, ks: Sequence[Tensor], at: float) -> Tensor:
    """W~ of thresholded scores R; in W's type."""
    result: Tensor = _compiled(_forward)(W, R, *ks, _number(at, R))
    return result


@torch.no_grad()
def backward(
    G: Tensor,
    W: Tensor,
    R: Tensor,
    ks: Sequence[Tensor],
    at: float,
    surrogate: Surrogate,
    wanted: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradients of the scores and of those scalars that are wanted, from G = dE/dW~."""
    inputs = (G, W, R, ks[2], ks[3], _number(at, R), surrogate)
    if not any(wanted):
        return _compiled(_scores_gradient)(*inputs), [None] * 4
    dR, *dks = _compiled(_gradients)(*inputs)
    return dR, [dk if wish else None for dk, wish in zip(dks, wanted, strict=True)]


@torch.no_grad()
def from_words(W: Tensor, words: Tensor, ks: Sequence[Tensor], out: Tensor) -> None:
    """Write W~ of a packed mask (32 bits to a word, row after row) to `out`."""
    rows, columns = W.shape
    body = columns // WORD if rows == 1 else 0  # words that are full; few weights are left
    if body:
        source, target = (t[0, : body * WORD].view(body, WORD) for t in (W, out))
        _compiled(_from_words)(source, words[:body], *ks, target)
    if body * WORD < columns:
        rest = body * WORD
        eager.from_words(W[:, rest:], words[body:], ks, out[:, rest:])


def _forward(
    W: Tensor, R: Tensor, k0: Tensor, k1: Tensor, k2: Tensor, k3: Tensor, at: Tensor
) -> Tensor:
    return _chosen(W, threshold(R, at), k0, k1, k2, k3)


def _chosen(W: Tensor, M: Tensor, k0: Tensor, k1: Tensor, k2: Tensor, k3: Tensor) -> Tensor:
    return torch.where(M, W * (k0 + k3) + (k1 + k2), W * k0 + k1).to(W.dtype)


def _scores_gradient(
    G: Tensor, W: Tensor, R: Tensor, k2: Tensor, k3: Tensor, at: Tensor, surrogate: Surrogate
) -> Tensor:
    G = G.to(R.dtype)
    dR = G * W * k3 + G * k2
    if surrogate == "identity":
        return dR
    slope = torch.sigmoid(R - at)
    return dR * slope * (1 - slope)


def _gradients(
    G: Tensor, W: Tensor, R: Tensor, k2: Tensor, k3: Tensor, at: Tensor, surrogate: Surrogate
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dR = _scores_gradient(G, W, R, k2, k3, at, surrogate)
    G = G.to(R.dtype)
    GW = G * W
    M = threshold(R, at)
    nothing = torch.zeros((), dtype=R.dtype, device=R.device)
    parts = (GW, G, torch.where(M, G, nothing), torch.where(M, GW, nothing))
    dk0, dk1, dk2, dk3 = (part.sum(1, keepdim=True) for part in parts)
    return dR, dk0, dk1, dk2, dk3


def _from_words(
    W: Tensor, words: Tensor, k0: Tensor, k1: Tensor, k2: Tensor, k3: Tensor, out: Tensor
) -> None:
    places = torch.arange(WORD, dtype=torch.int32, device=words.device)
    M = ((words.unsqueeze(1) >> places) & 1).bool()
    out.copy_(_chosen(W, M, k0, k1, k2, k3))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def _number(value: float, like: Tensor) -> Tensor:
    # A plain float would be compiled in, and every new value compiled anew.
    return _tensor(value, like.dtype, like.device)


@cache
def _tensor(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)
