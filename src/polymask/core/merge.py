"""Merged networks: a domain as an ordinary network, one network that becomes many domains, and the memory for them.

The C library gives large pieces of memory back to the system, and the pages of a new one are cleared one by one when
they are first written to, which takes longer than all arithmetic on them. So large pieces are kept and used again.

A kernel goes over a buffer of many weights in one call. Each tensor begins with a block of its own, so a block has one
set of scalars. What is learned stays what it is, parameters with names and shapes; only the memory behind them is the
buffer's. Nothing else remembers it: whether tensors lie as planned is seen from their addresses.
"""

import copy
import ctypes
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from polymask.core.network import copy_with, features_of, named_tensors, owner_of, put_module, structural_copy
from polymask.errors import DomainError

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain
    from polymask.core.parts import Transform


def merge(domain: "Domain", base: "Base", *, compact: bool = False) -> nn.Module:
    """A structural copy of the base with a domain's tensors; nothing is shared with the domain."""
    check_mergeable(domain)
    own = {id(tensor) for _, tensor in named_tensors(domain)}
    with torch.no_grad(), domain.in_mode(training=False):
        weights = domain.weights(base)
        net = copy_with(base.net, {n: t.detach().clone() if id(t) in own else t for n, t in weights.items()})
    if compact:
        for name, transform in domain.named_transforms():
            layer = name.rpartition(".")[0]
            if (smaller := transform.compact(net.get_submodule(layer))) is not None:
                put_module(net, layer, smaller)
    if domain.head is None:
        return net
    return _with_head(net, base, copy.deepcopy(domain.head).requires_grad_(False)).eval()


class WorkingNetwork:
    """One network that becomes one domain after another, in memory that it keeps.

    What `switch` gives is good until the next `switch`. Transformed weights are written to the
    network's own memory; norms and head are the domain's own tensors, so a domain that learns on
    must be switched to again. One thread at a time.
    """

    def __init__(self, base: "Base") -> None:
        self.base = base
        self._net = structural_copy(base.net)
        self._places = _places_of_tensors(self._net)
        self._memory: dict[str, nn.Parameter] = {}
        self._changed: set[str] = set()
        self._given: dict[str, Tensor] = {}  # what is not in its own memory: tensors of the domain, or made of them

    def switch(self, domain: "Domain") -> nn.Module:
        """The network with a domain's weights, norms and head."""
        check_mergeable(domain)
        with torch.no_grad(), domain.in_mode(training=False):
            tensors = domain.weights(self.base, made=self.write(domain))
        if left := self._changed - tensors.keys():
            original = dict(named_tensors(self.base.net))
            for name in left:
                self._put(name, original.get(name))
        for name, tensor in tensors.items():
            self._put(name, tensor)
        self._changed = set(tensors)
        self._given = {name: tensor for name, tensor in tensors.items() if name not in self._memory}
        return _with_head(self._net, self.base, domain.head or nn.Identity())

    def rewrite(self, domain: "Domain") -> nn.Module:
        """The network once more for the domain that it was last switched to, whose tensors have been written to since.

        It has the same tensors still, and perhaps another head.
        """
        if self._given:
            own = {tensor.data_ptr() for _, tensor in named_tensors(domain)}
            if any(tensor.data_ptr() not in own for tensor in self._given.values()):
                return self.switch(domain)
            self._given = {}  # once is enough: they stay the domain's own
        with torch.no_grad():
            self.write(domain)
        return _with_head(self._net, self.base, domain.head or nn.Identity())

    def has_room_for(self, domain: "Domain") -> bool:
        """Whether its memory is just what the domain's weights take."""
        return self._memory.keys() == _changing(domain).keys()

    def write(self, domain: "Domain") -> dict[str, Tensor]:
        """The weights of a domain that it transforms, written to the network's memory."""
        transforms = _changing(domain)
        self._make_room(list(transforms))
        written = domain.method.together(self.base, domain, self._memory)
        for name, transform in transforms.items():
            if name not in written:
                transform.write(self.base.tensor(name), self._memory[name])
        return {name: self._memory[name] for name in transforms}

    def _make_room(self, names: Sequence[str]) -> None:
        """Memory for weights that had none yet, in one buffer where they are of one type."""
        new = [name for name in names if name not in self._memory]
        weights = [self.base.tensor(name) for name in new]
        empty = [torch.empty(w.shape, dtype=w.dtype, device=w.device) for w in weights]
        if {w.dtype for w in weights} == {torch.float32}:
            move_together(plan_buffer(tuple(w.numel() for w in weights), BLOCK, weights[0].device), empty)
        for name, memory in zip(new, empty, strict=True):
            self._memory[name] = nn.Parameter(memory, requires_grad=False)

    def _put(self, name: str, tensor: Tensor | None) -> None:
        for owner, leaf in self._places.get(name) or [owner_of(self._net, name)]:
            if leaf in owner._buffers:
                owner._buffers[leaf] = tensor
            elif tensor is None or isinstance(tensor, nn.Parameter):
                owner._parameters[leaf] = tensor
            else:
                owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def _changing(domain: "Domain") -> "dict[str, Transform]":
    """The transforms whose W~ is not W."""
    return {name: transform for name, transform in domain.named_transforms() if not transform.keeps_weight}


def check_mergeable(domain: "Domain") -> None:
    """Raise where a domain cannot be one network."""
    if not domain.method.mergeable:
        raise DomainError(
            f"{domain.method.name} decides by the image what runs, so it cannot be merged into one network; call the "
            "domain itself, or MultiDomainModel"
        )


def _with_head(net: nn.Module, base: "Base", head: nn.Module) -> nn.Module:
    """The network with a head where the base's classifier stood, or after it."""
    if base.classifier is None or not isinstance(base.head, nn.Linear):
        return _Headed(net, head)
    put_module(net, base.classifier, head)
    return net


class _Headed(nn.Sequential):
    """A network and a head after it; features may come in an object that holds them."""

    def forward(self, images: Tensor) -> Tensor:
        net, head = self
        return cast(Tensor, head(features_of(net(images))))


def _places_of_tensors(net: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Where each tensor stands, by the first of its names; tied ones stand in several places."""
    by_id: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in net.modules():
        for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                by_id[id(tensor)].append((module, leaf))
    return {name: by_id[id(tensor)] for name, tensor in named_tensors(net)}


_TRIM_THRESHOLD, _MMAP_MAX, _NEVER = -1, -4, 2**31 - 1  # of glibc's mallopt


def keep_freed_memory() -> bool:
    """Let this process keep memory that it frees, for what it needs next; whether that worked.

    A training step takes and frees some hundred megabytes, which glibc by default gives back every time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))


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
        storage, shape = tensors[0].untyped_storage(), (len(self.owner), self.width)
        places = [storage.data_ptr() + _BYTES * start for start in self.starts]
        if storage.nbytes() != _BYTES * shape[0] * shape[1] or [t.data_ptr() for t in tensors] != places:
            return None
        return tensors[0].detach().as_strided(shape, (self.width, 1), 0)


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
    owner = torch.repeat_interleave(torch.arange(len(sizes), device=device), torch.tensor(blocks, device=device))
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
