"""Memory that is used again: what a training step takes as one large piece, every step anew.

The C library gives large pieces back to the system, and the pages of a new one are cleared one by
one when they are first written to, which takes longer than all arithmetic on them.
"""

import weakref

import numpy as np
import torch
from torch import Tensor, nn


class KeptMemory:
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


_KEPT: "weakref.WeakKeyDictionary[nn.Module, KeptMemory]" = weakref.WeakKeyDictionary()


def kept_memory(owner: nn.Module) -> KeptMemory:
    """What is kept for a module, as long as it lives."""
    return _KEPT.setdefault(owner, KeptMemory())


def release_memory(owner: nn.Module) -> None:
    """Give back what is kept for a module; whoever holds a tensor of it goes on doing so."""
    _KEPT.pop(owner, None)
