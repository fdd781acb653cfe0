"""From images and a domain's name to logits: library, cache and batcher at work together.

It knows nothing of HTTP, and is what a worker process and a Ray replica have in common.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from polymask.base import Base
from polymask.merged_cache import MergedCache
from polymask.predict import logits
from polymask.serve.batcher import Batcher
from polymask.serve.images import crops_of, feed_of
from polymask.serve.library import Entry, Library, PackReplaced
from polymask.serve.refusal import Refusal
from polymask.serve.settings import Settings

R = TypeVar("R")

_LOOKS = 5  # at a pack that is replaced while it is loaded


@dataclass(frozen=True, eq=False)
class Answer:
    """What one version of a domain says of images."""

    entry: Entry
    logits: Tensor  # (N, classes)
    warm: bool  # its network was there already


class Engine:
    """One base and a library, ready for requests. Use it in one event loop.

    `observe(images, seconds)` is told of every batch.
    """

    def __init__(
        self,
        settings: Settings,
        base: Base,
        observe: Callable[[int, float], None] = lambda images, seconds: None,
    ) -> None:
        self.settings, self.base = settings, base
        self.cache = MergedCache(base, settings.cache_bytes)
        self.library = Library(
            settings.library, base, max_side=settings.max_side, forget=self.cache.drop
        )
        self.batcher: Batcher[Entry] = Batcher(
            self._run,
            window=settings.window,
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            runners=settings.runners,
            observe=observe,
        )
        self._aside = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="polymask-aside")

    async def predict(self, name: str, images: Sequence[bytes]) -> Answer:
        """What a domain says of image files."""
        with self.batcher.room_for(len(images)):
            return await self._in_time(self._predict(name, images))

    async def predict_all(
        self, names: Sequence[str] | None, images: Sequence[bytes]
    ) -> list[Answer]:
        """What several domains say of the same image files; all of them where none is named.

        A domain that vanishes or cannot be loaded meanwhile is left out.
        """
        entries = await self.aside(self._several, names)
        most = self.settings.auto_domains
        if not entries:
            raise Refusal(404, "the library has no domain to compare")
        if len(entries) > most:
            raise Refusal(
                422,
                f"{len(entries)} domains are too many to compare; name up to {most} in `domains`",
            )
        cost = len(images) * len(entries)
        if cost > self.settings.max_queue:
            raise Refusal(
                422,
                f"{len(images)} images for {len(entries)} domains are {cost} runs of the network; "
                f"{self.settings.max_queue} are allowed: send fewer images or name some `domains`",
            )
        with self.batcher.room_for(cost):
            return await self._in_time(self._predict_all(entries, images))

    async def aside(self, work: Callable[..., R], *arguments: object) -> R:
        """Run what may take long, or wait for a disk, beside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._aside, work, *arguments)

    async def close(self) -> None:
        """Finish what is under way, then stop the threads."""
        await self.batcher.close()
        self._aside.shutdown()

    async def _in_time(self, work: Coroutine[Any, Any, R]) -> R:
        try:
            async with asyncio.timeout(self.settings.timeout):
                return await work
        except TimeoutError as error:
            raise Refusal(
                503,
                f"no answer within {self.settings.timeout:g} s; try again later",
                headers={"Retry-After": "5"},
            ) from error

    async def _predict(self, name: str, images: Sequence[bytes]) -> Answer:
        for _ in range(_LOOKS):
            entry, crops = await self.aside(self._prepare, name, images)
            warm = entry.key in self.cache
            try:
                return Answer(entry, await self.batcher.submit(entry, crops), warm)
            except PackReplaced:
                continue
        raise Refusal(503, f"the pack of {name} changes too fast", headers={"Retry-After": "1"})

    async def _predict_all(self, entries: list[Entry], images: Sequence[bytes]) -> list[Answer]:
        crops = {}
        for spec in {entry.input for entry in entries}:
            crops[spec] = await self.aside(crops_of, spec, images, self.settings.max_pixels)
        warm = {entry.key for entry in entries if entry.key in self.cache}
        found = await asyncio.gather(
            *(self.batcher.submit(entry, crops[entry.input]) for entry in entries),
            return_exceptions=True,
        )
        answers = []
        for entry, result in zip(entries, found, strict=True):
            if isinstance(result, PackReplaced | Refusal):
                continue
            if isinstance(result, BaseException):
                raise result
            answers.append(Answer(entry, result, entry.key in warm))
        if not answers:
            raise Refusal(503, "no domain could answer", headers={"Retry-After": "1"})
        return answers

    def _several(self, names: Sequence[str] | None) -> list[Entry]:
        if names is None:
            return self.library.entries()
        return [self.library.find(name) for name in dict.fromkeys(names)]

    def _prepare(self, name: str, images: Sequence[bytes]) -> tuple[Entry, Tensor]:
        entry = self.library.find(name)
        return entry, crops_of(entry.input, images, self.settings.max_pixels)

    @torch.no_grad()
    def _run(self, entry: Entry, crops: Tensor) -> Tensor:
        net = self.cache.network(entry.key, partial(self.library.load, entry))
        images = feed_of(entry.input).batch(crops).to(self.base.device)
        found = logits(net, images).cpu()
        if not torch.isfinite(found).all():
            self.library.reject(entry, "its network gives values that are not finite")
            raise Refusal(409, f"the network of {entry.name} gives values that are not finite")
        return found
