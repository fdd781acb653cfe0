"""Weights as the matrices that kernels work on: a row for each set of scalars."""

from math import prod

import torch
from torch import Tensor


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
