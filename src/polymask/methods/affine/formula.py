"""The affine map of a site's weights, and its gradients.

    W~ = k0 W + k1 1 + k2 M + k3 W∘M

For one weight w it is a choice between two affine maps of it, k0 w + k1 and
(k0 + k3) w + (k1 + k2). `kernels` computes it and the gradients.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polymask.core.bits import Surrogate
from polymask.methods.affine import kernels


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
