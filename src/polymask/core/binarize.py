"""The threshold, with a surrogate gradient.

    m = h(r) = 1[r >= t]          dE/dr := h~'(r) dE/dm

h has no useful gradient, so that of a strictly increasing h~ stands in for it: the identity
(h~' = 1, the straight-through estimator), or the sigmoid around the threshold.
Since h~' > 0, the step that dE/dr induces moves m the way that dE/dm asks for.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Surrogate = Literal["identity", "sigmoid"]
SURROGATES: tuple[str, ...] = get_args(Surrogate)


def threshold(scores: Tensor, at: float | Tensor) -> Tensor:
    """h(r): a boolean tensor."""
    return scores >= at


def scale_by_surrogate(gradient: Tensor, scores: Tensor, at: float, surrogate: Surrogate) -> Tensor:
    """h~'(r) * gradient; writes to `gradient`."""
    if surrogate == "identity":
        return gradient
    slope = torch.sigmoid(scores - at)
    return gradient.mul_(slope).mul_(1 - slope)


class _Binarize(torch.autograd.Function):
    @staticmethod
    def forward(scores: Tensor, at: float, surrogate: Surrogate) -> Tensor:
        return threshold(scores, at).to(scores.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        scores, ctx.at, ctx.surrogate = inputs
        ctx.save_for_backward(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (scores,) = ctx.saved_tensors
        return scale_by_surrogate(grad.clone(), scores, ctx.at, ctx.surrogate), None, None


def binarize(scores: Tensor, at: float = 0.0, surrogate: Surrogate = "identity") -> Tensor:
    """h(r) as zeros and ones of the scores' own type, with the surrogate's gradient."""
    result: Tensor = _Binarize.apply(scores, at, surrogate)  # type: ignore[no-untyped-call]
    return result
