"""Requests collected for a few milliseconds, grouped by what runs them, run by a few threads.

All bookkeeping happens in the event loop, so it needs no locks; only `run` is called in threads.
The group whose first request is oldest goes first once that request has waited for `window`
seconds, or a group that is full; requests that come while all threads are busy gather meanwhile.
So a request waits at most for those that came before it, however its group is mixed.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from polymask.serve.settings import Refusal, busy

Observe = Callable[[int, float], None]  # images and seconds of a batch


def observe_nothing(images: int, seconds: float) -> None:
    """For a batcher whose batches nobody counts."""


class Keyed(Protocol):
    """What requests are for: those with the same key may run together."""

    @property
    def key(self) -> str: ...


T = TypeVar("T", bound=Keyed)


@dataclass(frozen=True, eq=False)
class _Job:
    images: Tensor  # (n, …)
    answer: "asyncio.Future[Tensor]"
    since: float


@dataclass(frozen=True, eq=False)
class _Lane(Generic[T]):
    """What waits for one target."""

    target: T
    jobs: deque[_Job] = field(default_factory=deque)

    @property
    def size(self) -> int:
        return sum(len(job.images) for job in self.jobs)


class Batcher(Generic[T]):
    """Runs `run(target, images (N, …)) -> (N, …)` for many requests at once; `observe` hears of every batch."""

    def __init__(
        self,
        run: Callable[[T, Tensor], Tensor],
        *,
        window: float = 0.002,
        max_batch: int = 32,
        max_queue: int = 512,
        runners: int = 1,
        observe: Observe = observe_nothing,
    ) -> None:
        self._run, self._observe = run, observe
        self.window, self.max_batch, self.max_queue = window, max_batch, max_queue
        self.admitted = 0
        self._lanes: dict[str, _Lane[T]] = {}
        self._free = runners
        self._pool = ThreadPoolExecutor(runners, thread_name_prefix="polymask-runner")
        self.closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._seconds_each = 0.02  # of an image: a moving average
        self._running: set[asyncio.Future[None]] = set()

    @contextmanager
    def room_for(self, images: int) -> Iterator[None]:
        """Admit a request, or refuse it at once: what is under way is bounded."""
        if images > self.max_queue:  # coming back would not help
            message = f"the request takes {images} runs of networks, {self.max_queue} are allowed; send fewer images"
            raise Refusal(422, message)
        if self.admitted + images > self.max_queue:
            raise busy(f"{self.admitted} images are waiting already", self.admitted * self._seconds_each)
        self.admitted += images
        try:
            yield
        finally:
            self.admitted -= images

    async def submit(self, target: T, images: Tensor) -> Tensor:
        """What `run` gives for these images, run together with others for the same target."""
        job = _Job(images, asyncio.get_running_loop().create_future(), monotonic())
        self._lanes.setdefault(target.key, _Lane(target)).jobs.append(job)
        self._pump()
        return await job.answer

    async def close(self) -> None:
        """Answer what is waiting, then stop the threads."""
        self.window = 0
        self.closed = True
        self._pump()
        while self._running:
            await asyncio.wait(set(self._running))
        self._pool.shutdown()

    def _pump(self) -> None:
        """Start what is due on threads that are free; come back when more is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._free:
            for lane in list(self._lanes.values()):
                while lane.jobs and lane.jobs[0].answer.done():  # the sender has gone
                    lane.jobs.popleft()
                if not lane.jobs:
                    del self._lanes[lane.target.key]
            if not self._lanes:
                return
            lane = min(self._lanes.values(), key=lambda lane: lane.jobs[0].since)
            wait = lane.jobs[0].since + self.window - monotonic()
            if wait > 0:
                full = [one for one in self._lanes.values() if one.size >= self.max_batch]
                if not full:
                    self._timer = asyncio.get_running_loop().call_later(wait, self._pump)
                    return
                lane = full[0]
            self._start(lane)

    def _start(self, lane: _Lane[T]) -> None:
        batch: list[_Job] = []
        count = 0
        while lane.jobs and (not batch or count + len(lane.jobs[0].images) <= self.max_batch):
            job = lane.jobs.popleft()
            if not job.answer.done():
                batch.append(job)
                count += len(job.images)
        if not lane.jobs:
            del self._lanes[lane.target.key]
        if not batch:
            return
        self._free -= 1
        work = asyncio.ensure_future(self._work(lane.target, batch, count))
        self._running.add(work)
        work.add_done_callback(self._running.discard)

    async def _work(self, target: T, batch: list[_Job], count: int) -> None:
        images = torch.cat([job.images for job in batch])
        began = monotonic()
        running = asyncio.get_running_loop().run_in_executor(self._pool, self._in_pieces, target, images)
        await asyncio.wait([running])
        seconds = monotonic() - began
        self._free += 1
        error = running.exception()
        start = 0
        for job in batch:
            if not job.answer.done():
                if error is not None:
                    job.answer.set_exception(error)
                else:
                    job.answer.set_result(running.result()[start : start + len(job.images)])
            start += len(job.images)
        if error is None:
            self._seconds_each += 0.1 * (seconds / count - self._seconds_each)
            self._observe(count, seconds)
        self._pump()

    def _in_pieces(self, target: T, images: Tensor) -> Tensor:
        """One request may hold more images than a batch."""
        return torch.cat([self._run(target, piece) for piece in torch.split(images, self.max_batch)])
