"""Many tensors in one buffer of blocks: where each begins, and how they get there.

A kernel goes over the whole buffer in one call. Each tensor begins with a block of its own, so a
block has one set of scalars. What is learned stays what it is, parameters with names and shapes;
only the memory behind them is the buffer's. Nothing else remembers it: whether tensors lie as
planned is seen from their addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from polymask.core.kept import KeptMemory

BLOCK = 1024  # weights
_BYTES = 4  # of an element: float32, or a word of 32 bits


@dataclass(frozen=True, eq=False)
class Plan:
    """Where tensors of these sizes lie, counted in elements, in blocks of `width` elements."""

    width: int
    starts: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # from, to
    owner: Tensor  # (blocks,) int64: whose each block is

    def buffer(self, dtype: torch.dtype, memory: KeptMemory | None = None) -> Tensor:
        """A buffer (blocks, width), new or in kept memory: its padding zero, nothing else said."""
        shape = (len(self.owner), self.width)
        if memory is not None and dtype == torch.float32 and self.owner.device.type == "cpu":
            made = memory.take(shape)
        else:
            made = torch.empty(shape, dtype=dtype, device=self.owner.device)
        for begin, end in self.padding:
            made.view(-1)[begin:end] = 0
        return made

    def pieces(self, buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The places of the tensors in a buffer, of their shapes and layouts."""
        return [buffer.as_strided(t.shape, t.stride(), start) for t, start in zip(like, self.starts, strict=True)]

    def whole(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The buffer that tensors lie in; None where they do not lie as planned."""
        first = tensors[0]
        storage = first.untyped_storage()
        origin, size = storage.data_ptr(), len(self.owner) * self.width
        if storage.nbytes() != _BYTES * size:
            return None
        for tensor, start in zip(tensors, self.starts, strict=True):
            if tensor.data_ptr() != origin + _BYTES * start:
                return None
        return first.detach().as_strided((len(self.owner), self.width), (self.width, 1), 0)


@cache
def plan(sizes: tuple[int, ...], width: int, device: torch.device) -> Plan:
    """For tensors of so many elements each, in this order."""
    blocks = [-(-size // width) for size in sizes]
    starts, padding, begin = [], [], 0
    for size, count in zip(sizes, blocks, strict=True):
        starts.append(begin)
        if size < count * width:
            padding.append((begin + size, begin + count * width))
        begin += count * width
    counts = torch.tensor(blocks, device=device)
    owner = torch.repeat_interleave(torch.arange(len(sizes), device=device), counts)
    return Plan(width, tuple(starts), tuple(padding), owner)


@torch.inference_mode(False)  # what is made here may learn later
@torch.no_grad()
def copy_together(plan: Plan, tensors: Sequence[Tensor], like: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A new buffer with what is in tensors, laid out as `like` are, and its pieces."""
    buffer = plan.buffer(tensors[0].dtype)
    pieces = plan.pieces(buffer, like)
    for tensor, piece in zip(tensors, pieces, strict=True):
        piece.copy_(tensor)
    return buffer, pieces


def move_together(plan: Plan, tensors: Sequence[Tensor]) -> Tensor:
    """Give tensors, which stay the objects that they are, their places in a new buffer."""
    buffer, pieces = copy_together(plan, tensors, tensors)
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.data = piece
    return buffer
