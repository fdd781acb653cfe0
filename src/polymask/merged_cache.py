"""Merged networks kept warm: the most recently used ones, within a budget of bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from polymask.base import Base
from polymask.bits import Bits
from polymask.domain import Domain
from polymask.predict import network
from polymask.surgery import named_tensors

Network = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CacheStats:
    """What a cache has done so far. A miss is a merge; who waits for another's merge has a hit."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes: int = 0  # held now, beyond the base's own


@dataclass(frozen=True)
class _Entry:
    network: Network
    bytes: int


class MergedCache:
    """Networks of domains, merged when first asked for, dropped when least recently used.

    Any number of threads may call it. An entry costs the bytes of its tensors that are not the
    base's own; one that costs more than the whole budget is given out but not kept. A network that
    was given out lives on for those who hold it, so memory may exceed the budget by what is in use.

    `lock` is held while the base's own modules are copied or run: give the one that guards them
    elsewhere, if there is one.
    """

    def __init__(
        self,
        base: Base,
        budget_bytes: int,
        *,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.base, self.budget_bytes = base, budget_bytes
        self._base_lock = threading.Lock() if lock is None else lock
        self._lock = threading.Lock()  # guards what follows
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._merging: dict[str, Future[Network]] = {}
        self._hits = self._misses = self._evictions = self._bytes = 0

    def network(self, name: str, domain: Domain | Callable[[], Domain]) -> Network:
        """What runs the domain: its merged network, or itself if it cannot be merged.

        `domain` may be a function that gives it, called only if the network is cold. Threads that
        ask for the same cold name wait for one merge, and share its failure if it fails.
        """
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                self._entries.move_to_end(name)
                self._hits += 1
                return entry.network
            merging = self._merging.get(name)
            if merging is None:
                self._misses += 1
                mine: Future[Network] = Future()
                self._merging[name] = mine
            else:
                self._hits += 1
        if merging is not None:
            return merging.result()
        return self._merge(name, domain, mine)

    def drop(self, name: str) -> None:
        """Forget a network; a merge that is under way is given out but not kept."""
        with self._lock:
            self._merging.pop(name, None)
            entry = self._entries.pop(name, None)
            if entry is not None:
                self._bytes -= entry.bytes

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._entries

    def names(self) -> list[str]:
        """The warm ones, the least recently used first."""
        with self._lock:
            return list(self._entries)

    @property
    def stats(self) -> CacheStats:
        """Counts since the cache was made."""
        with self._lock:
            return CacheStats(self._hits, self._misses, self._evictions, self._bytes)

    def _merge(
        self, name: str, domain: Domain | Callable[[], Domain], mine: Future[Network]
    ) -> Network:
        try:
            found = domain if isinstance(domain, Domain) else domain()
            with self._base_lock:
                made = network(self.base, found)
            if not isinstance(made, nn.Module):  # it runs the base's own modules
                made = partial(_run_alone, self._base_lock, made)
            entry = _Entry(made, self._cost(made, found))
        except BaseException as error:
            with self._lock:
                if self._merging.get(name) is mine:
                    del self._merging[name]
            mine.set_exception(error)
            raise
        with self._lock:
            if self._merging.get(name) is mine:  # not dropped meanwhile
                del self._merging[name]
                self._keep(name, entry)
        mine.set_result(entry.network)
        return entry.network

    def _keep(self, name: str, entry: _Entry) -> None:
        if entry.bytes > self.budget_bytes:
            return
        self._entries[name] = entry
        self._bytes += entry.bytes
        while self._bytes > self.budget_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= oldest.bytes
            self._evictions += 1

    def _cost(self, made: Network, domain: Domain) -> int:
        if isinstance(made, nn.Module):
            own: Iterable[Tensor] = (tensor for _, tensor in named_tensors(made))
        else:
            own = (s.words if isinstance(s, Bits) else s for s in domain.stored().values())
        modules = [m for m in (self.base.net, self.base.head) if m is not None]
        shared = {_storage(tensor)[0] for m in modules for _, tensor in named_tensors(m)}
        sizes = dict(_storage(tensor) for tensor in own)
        return sum(size for place, size in sizes.items() if place not in shared)


def _storage(tensor: Tensor) -> tuple[int, int]:
    """(address, bytes) of the memory behind a tensor."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@torch.no_grad()
def _run_alone(lock: AbstractContextManager[object], run: Network, images: Tensor) -> Tensor:
    with lock:
        return run(images)
