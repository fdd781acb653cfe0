"""The arithmetic of `eager` over all sites at once, in one pass over memory, by torch.compile.

Weights W and scores R are buffers (blocks, 1024), K (sites, 4) the scalars, `owner` (blocks,) says
which site a block belongs to. Values are those of `eager` to the bit; gradients differ in rounding.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from polymask.core.binarize import Surrogate, threshold
from polymask.core.bits import WORD
from polymask.methods.affine.formula import affine


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
