"""Merged networks kept warm: the most recently used ones, within a budget of bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from polymask.core.base import Base
from polymask.core.bits import Bits
from polymask.core.domain import Domain
from polymask.core.merge import WorkingNetwork
from polymask.core.network import named_tensors
from polymask.pack.format import inspect
from polymask.pack.mould import Kind, Mould, kind_of, poured

Network = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Source:
    """Where a cold domain comes from: a pack, which may be read into a mould of its kind."""

    kind: Kind
    load: Callable[[Mould | None], Mould]

    @classmethod
    def of(cls, path: Path, base: Base) -> "Source":
        """A pack for a base."""
        return cls(kind_of(inspect(path).manifest), partial(poured, path, base))


Origin = Domain | Source | Callable[[], Domain]


@dataclass(frozen=True)
class CacheStats:
    """What a cache has done so far. A miss is a merge; who waits for another's merge has a hit."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes: int = 0  # held now, beyond the base's own


@dataclass(eq=False)
class _Entry:
    network: Network
    bytes: int
    working: WorkingNetwork | None  # whose network it is; None where nothing was merged
    mould: Mould | None = None  # whose domain it is, where the next one can be written into it
    users: int = 0


@dataclass(eq=False)
class _Merge:
    """One that is under way."""

    done: Future[_Entry]
    waiting: int = 1


class MergedCache:
    """Networks of domains, merged when first asked for, dropped when least recently used.

    Any number of threads may call it. An entry costs the bytes of its tensors that are not the
    base's own; one that costs more than the whole budget is given out but not kept. A network is
    never changed while it is used, so memory may exceed the budget by what is in use. Where it is
    full, a new network takes over modules and memory of the one that has to go; one that is read from
    a pack of the same kind is just written into it.

    `lock` is held while the base's own modules are copied or run: give the one that guards them
    elsewhere, if there is one.
    """

    def __init__(self, base: Base, budget_bytes: int, *, lock: AbstractContextManager[object] | None = None) -> None:
        self.base, self.budget_bytes = base, budget_bytes
        self._base_lock = threading.Lock() if lock is None else lock
        self._lock = threading.Lock()  # guards what follows
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._merging: dict[str, _Merge] = {}
        self._hits = self._misses = self._evictions = self._bytes = 0
        self._last = 0  # bytes of the last one kept: what another will cost, more or less

    @contextmanager
    def use(self, name: str, domain: Origin) -> Iterator[Network]:
        """What runs the domain: its merged network, or itself if it cannot be merged.

        `domain` may be a source or a function that gives it, asked only if the network is cold. Threads that ask for
        the same cold name wait for one merge, and share its failure if it fails. What is given is good within the
        `with` only.
        """
        entry = self._take(name, domain)
        try:
            yield entry.network
        finally:
            with self._lock:
                entry.users -= 1

    def drop(self, name: str) -> None:
        """Forget a network; a merge that is under way is given out but not kept."""
        with self._lock:
            self._merging.pop(name, None)
            if name in self._entries:
                self._remove(name)

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

    def _take(self, name: str, domain: Origin) -> _Entry:
        """The entry of a domain, with one user more."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                self._entries.move_to_end(name)
                self._hits += 1
                entry.users += 1
                return entry
            merge = self._merging.get(name)
            if merge is not None:
                self._hits += 1
                merge.waiting += 1
            else:
                self._misses += 1
                mine = self._merging[name] = _Merge(Future())
        return self._merge(name, domain, mine) if merge is None else merge.done.result()

    def _merge(self, name: str, domain: Origin, mine: _Merge) -> _Entry:
        try:
            if isinstance(domain, Source):
                entry = self._poured(domain)
            else:
                entry = self._made(domain if isinstance(domain, Domain) else domain())
        except BaseException as error:
            with self._lock:
                if self._merging.get(name) is mine:
                    del self._merging[name]
            mine.done.set_exception(error)
            raise
        with self._lock:
            entry.users = mine.waiting  # nobody joins after this
            if self._merging.get(name) is mine:  # not dropped meanwhile
                del self._merging[name]
                self._keep(name, entry)
        mine.done.set_result(entry)
        return entry

    def _made(self, domain: Domain) -> _Entry:
        if not domain.method.mergeable:
            run = partial(_run_alone, self._base_lock, partial(domain.frozen(), self.base))
            stored = domain.stored().values()
            return _Entry(run, self._cost(t.words if isinstance(t, Bits) else t for t in stored), None)
        old = self._reclaimed(lambda entry: bool(entry.working and entry.working.has_room_for(domain)))
        working = None if old is None else old.working
        with self._base_lock:
            working = working or WorkingNetwork(self.base)
            net = working.switch(domain)
        return _Entry(net, self._cost(tensor for _, tensor in named_tensors(net)), working)

    def _poured(self, source: Source) -> _Entry:
        """From a pack; into the network of one of its kind that has to go, where there is one."""
        old = self._reclaimed(lambda entry: entry.mould is not None and entry.mould.kind == source.kind)
        without_head = 0 if old is None or old.mould is None else old.bytes - _head_bytes(old.mould.domain)
        mould = source.load(None if old is None else old.mould)
        if old is None or mould is not old.mould or old.working is None:
            entry = self._made(mould.domain)
            if mould.fills and entry.working is not None:
                entry.mould, entry.bytes = mould, entry.bytes + mould.mask_bytes
            return entry
        with self._base_lock:
            net = old.working.rewrite(mould.domain)
        return _Entry(net, without_head + _head_bytes(mould.domain), old.working, mould)

    def _reclaimed(self, fits: Callable[[_Entry], bool]) -> _Entry | None:
        """An entry that has to go for the next one, that nobody uses, and that has something to give to it."""
        with self._lock:
            under_way = max(1, len(self._merging))  # each takes its place; this is one of them
            if self._bytes + under_way * self._last <= self.budget_bytes:
                return None
            for name, entry in self._entries.items():
                if not entry.users and fits(entry):
                    self._remove(name)
                    self._evictions += 1
                    return entry
        return None

    def _keep(self, name: str, entry: _Entry) -> None:
        if entry.bytes > self.budget_bytes:
            return
        self._entries[name] = entry
        self._bytes += entry.bytes
        self._last = entry.bytes
        while self._bytes > self.budget_bytes:
            self._remove(next(iter(self._entries)))
            self._evictions += 1

    def _remove(self, name: str) -> None:
        self._bytes -= self._entries.pop(name).bytes

    def _cost(self, own: Iterable[Tensor]) -> int:
        """Bytes of tensors that are not the base's."""
        modules = [m for m in (self.base.net, self.base.head) if m is not None]
        shared = {_storage(tensor)[0] for m in modules for _, tensor in named_tensors(m)}
        sizes = dict(_storage(tensor) for tensor in own)
        return sum(size for place, size in sizes.items() if place not in shared)


def _head_bytes(domain: Domain) -> int:
    return 0 if domain.head is None else sum(p.nbytes for p in domain.head.parameters())


def _storage(tensor: Tensor) -> tuple[int, int]:
    """(address, bytes) of the memory behind a tensor."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@torch.no_grad()
def _run_alone(lock: AbstractContextManager[object], run: Network, images: Tensor) -> Tensor:
    with lock:
        return run(images)
