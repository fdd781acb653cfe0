"""The affine map of a site's weights, and its gradients.

    W~ = k0 W + k1 1 + k2 M + k3 W∘M

For one weight w it is a choice between two affine maps of it, k0 w + k1 and
(k0 + k3) w + (k1 + k2). `polymask.methods.affine.eager` computes it and the gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polymask.core.binarize import Surrogate
from polymask.methods.affine import eager as kernels
from polymask.methods.affine.matrices import Matrices


def affine(
    W: Tensor,
    M: Tensor,
    k0: Tensor | float,
    k1: Tensor | float,
    k2: Tensor | float,
    k3: Tensor | float,
) -> Tensor:
    """k0 W + k1 + k2 M + k3 W∘M, as the choice between two affine maps; in W's type."""
    zeros = (W * k0).add_(k1)
    ones = (W * (k0 + k3)).add_(k1 + k2)
    return torch.where(M, ones, zeros).to(W.dtype)


class AffineMask(torch.autograd.Function):
    """`affine` of thresholded scores; keeps nothing for backward but its inputs."""

    @staticmethod
    def forward(
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
        out = kernels.forward(shape.matrix(W), shape.matrix(scores), columns, at)
        return shape.tensor(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        W, scores, *ks, ctx.at, ctx.surrogate = inputs
        ctx.fixed = [None if isinstance(k, Tensor) else k for k in ks]
        ctx.save_for_backward(W, scores, *(k for k in ks if isinstance(k, Tensor)))

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
        dks = kernels.backward(G, W, R, columns, ctx.at, ctx.surrogate, wanted, dR)
        shaped = (None if dk is None else dk.view(k.shape) for k, dk in zip(ks, dks, strict=True))
        return (None, shape.tensor(dR), *shaped, None, None)


def _scalar_shape(ks: Sequence[Tensor | float], dimensions: int) -> tuple[int, ...]:
    """The shape of the scalars that are learned; one number where none is."""
    shapes = [tuple(k.shape) for k in ks if isinstance(k, Tensor) and k.numel() > 1]
    return shapes[0] if shapes else (1,) * dimensions
