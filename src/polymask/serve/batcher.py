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
from dataclasses import dataclass
from time import monotonic
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from polymask.serve.settings import busy


class Keyed(Protocol):
    """Something with a name of its own."""

    @property
    def key(self) -> str:
        """Requests with the same key may run together."""


T = TypeVar("T", bound=Keyed)


@dataclass(frozen=True, eq=False)
class _Job:
    images: Tensor  # (n, …)
    answer: "asyncio.Future[Tensor]"
    since: float


class _Lane(Generic[T]):
    """What waits for one thing."""

    def __init__(self, target: T) -> None:
        self.target = target
        self.jobs: deque[_Job] = deque()

    def trim(self) -> None:
        """Forget those in front whose sender has gone."""
        while self.jobs and self.jobs[0].answer.done():
            self.jobs.popleft()

    @property
    def size(self) -> int:
        return sum(len(job.images) for job in self.jobs)


class Batcher(Generic[T]):
    """Runs `run(target, images (N, …)) -> (N, …)` for many requests at once.

    `observe(images, seconds)` is told of every batch.
    """

    def __init__(
        self,
        run: Callable[[T, Tensor], Tensor],
        *,
        window: float = 0.002,
        max_batch: int = 32,
        max_queue: int = 512,
        runners: int = 1,
        observe: Callable[[int, float], None] = lambda images, seconds: None,
    ) -> None:
        self._run, self._observe = run, observe
        self.window, self.max_batch, self.max_queue = window, max_batch, max_queue
        self.admitted = 0
        self._lanes: dict[str, _Lane[T]] = {}
        self._free = runners
        self._pool = ThreadPoolExecutor(runners, thread_name_prefix="polymask-runner")
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._seconds_each = 0.02  # of an image, lately
        self._running: set[asyncio.Future[None]] = set()

    @contextmanager
    def room_for(self, images: int) -> Iterator[None]:
        """Admit a request, or refuse it at once: what is under way is bounded."""
        if self.admitted + images > self.max_queue:
            wait = self.admitted * self._seconds_each
            raise busy(f"{self.admitted} images are waiting already", wait)
        self.admitted += images
        try:
            yield
        finally:
            self.admitted -= images

    async def submit(self, target: T, images: Tensor) -> Tensor:
        """What `run` says of these images, together with those of others for the same target."""
        job = _Job(images, asyncio.get_running_loop().create_future(), monotonic())
        self._lanes.setdefault(target.key, _Lane(target)).jobs.append(job)
        self._pump()
        return await job.answer

    async def close(self) -> None:
        """Answer what is waiting, then stop the threads."""
        self.window = 0
        self._closed = True
        self._pump()
        while self._running:
            await asyncio.wait(set(self._running))
        self._pool.shutdown()

    @property
    def alive(self) -> bool:
        """Whether anything that is submitted would be run."""
        return not self._closed

    def _pump(self) -> None:
        """Start what is due on threads that are free; come back when more is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._free:
            for lane in list(self._lanes.values()):
                lane.trim()
                if not lane.jobs:
                    del self._lanes[lane.target.key]
            if not self._lanes:
                return
            lane = min(self._lanes.values(), key=lambda lane: lane.jobs[0].since)
            wait = lane.jobs[0].since + self.window - monotonic()
            if wait > 0:
                full = (one for one in self._lanes.values() if one.size >= self.max_batch)
                chosen = next(full, None)
                if chosen is None:
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(wait, self._pump)
                    return
                lane = chosen
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
        images = torch.cat([job.images for job in batch]) if len(batch) > 1 else batch[0].images
        began = monotonic()
        running = asyncio.get_running_loop().run_in_executor(self._pool, self._in_pieces, target, images)
        await asyncio.wait([running])
        seconds = monotonic() - began
        self._free += 1
        error = running.exception()
        answers = None if error is not None else running.result()
        start = 0
        for job in batch:
            if not job.answer.done():
                if answers is None:
                    job.answer.set_exception(error or RuntimeError("no answer"))
                else:
                    job.answer.set_result(answers[start : start + len(job.images)])
            start += len(job.images)
        if error is None:
            self._seconds_each += 0.1 * (seconds / count - self._seconds_each)
            self._observe(count, seconds)
        self._pump()

    def _in_pieces(self, target: T, images: Tensor) -> Tensor:
        """One request may hold more images than a batch."""
        starts = range(0, len(images), self.max_batch)
        pieces = [self._run(target, images[start : start + self.max_batch]) for start in starts]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
