"""Memory: buffers that hold many tensors, pieces that are used again, and what the process does with freed pages.

The C library gives large pieces back to the system, and the pages of a new one are cleared one by one when they are
first written to, which takes longer than all arithmetic on them. So what a training step takes as one large piece is
kept and used again.

A kernel goes over a whole buffer of blocks in one call. Each tensor begins with a block of its own, so a block has one
set of scalars. What is learned stays what it is, parameters with names and shapes; only the memory behind them is the
buffer's. Nothing else remembers it: whether tensors lie as planned is seen from their addresses.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process keep memory that it frees, for what it needs next; whether that worked.

    A training step takes and frees some hundred megabytes, which glibc by default gives back every time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))


def give_back_freed_memory() -> bool:
    """Give the system every page that is free; whether there were any.

    glibc keeps memory for each thread by itself, and no thread uses what another has freed: a process whose threads
    make and drop networks grows and grows.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


class ReusedMemory:
    """One piece of memory, lent out to one tensor at a time."""

    def __init__(self) -> None:
        self._memory: np.ndarray | None = None
        self._lent: weakref.ref[np.ndarray] | None = None

    @property
    def is_free(self) -> bool:
        """Whether nobody holds the last tensor that was made of it, nor a view of that."""
        return self._lent is None or self._lent() is None

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Single precision, values not set; fresh memory where the piece is not free."""
        if not self.is_free:
            return torch.empty(shape)
        size = torch.Size(shape).numel()
        if self._memory is None or self._memory.size != size:
            self._memory = torch.empty(size).numpy()
        # A tensor keeps the array that it was made of alive, and nothing else does.
        array = self._memory[:]
        self._lent = weakref.ref(array)
        return torch.from_numpy(array).view(shape)


_OF_MODULES: "weakref.WeakKeyDictionary[nn.Module, ReusedMemory]" = weakref.WeakKeyDictionary()


def reused_memory(owner: nn.Module) -> ReusedMemory:
    """The piece of a module, which is kept as long as the module lives."""
    return _OF_MODULES.setdefault(owner, ReusedMemory())


def release_memory(owner: nn.Module) -> None:
    """Give back the piece of a module; whoever holds a tensor of it goes on doing so."""
    _OF_MODULES.pop(owner, None)


BLOCK = 1024  # weights
_BYTES = 4  # of an element: float32, or a word of 32 bits


@dataclass(frozen=True, eq=False)
class BufferPlan:
    """Where tensors of these sizes lie, counted in elements, in blocks of `width` elements."""

    width: int
    starts: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # from, to
    owner: Tensor  # (blocks,) int64: whose each block is

    def buffer(self, dtype: torch.dtype, memory: ReusedMemory | None = None) -> Tensor:
        """A buffer (blocks, width), new or in memory that is used again; only its padding is set, to zero."""
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
def plan_buffer(sizes: tuple[int, ...], width: int, device: torch.device) -> BufferPlan:
    """A plan for tensors of so many elements each, in this order."""
    blocks = [-(-size // width) for size in sizes]
    starts, padding, begin = [], [], 0
    for size, count in zip(sizes, blocks, strict=True):
        starts.append(begin)
        if size < count * width:
            padding.append((begin + size, begin + count * width))
        begin += count * width
    counts = torch.tensor(blocks, device=device)
    owner = torch.repeat_interleave(torch.arange(len(sizes), device=device), counts)
    return BufferPlan(width, tuple(starts), tuple(padding), owner)


@torch.inference_mode(False)  # what is made here may learn later
@torch.no_grad()
def copy_together(plan: BufferPlan, tensors: Sequence[Tensor], like: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A new buffer with what is in tensors, laid out as `like` are, and its pieces."""
    buffer = plan.buffer(tensors[0].dtype)
    pieces = plan.pieces(buffer, like)
    for tensor, piece in zip(tensors, pieces, strict=True):
        piece.copy_(tensor)
    return buffer, pieces


def move_together(plan: BufferPlan, tensors: Sequence[Tensor]) -> Tensor:
    """Give tensors, which stay the objects that they are, their places in a new buffer."""
    buffer, pieces = copy_together(plan, tensors, tensors)
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.data = piece
    return buffer
