"""From images and a domain's name, or none, to logits: library, cache and batcher at work together.

Which domain an image belongs to.

Where every domain that is compared has a likeness in its pack, by the base's own feature f(image):

    score(image, domain) = cos(f(image), likeness of the domain)

one run of the base, however many domains there are. Otherwise every domain's network is run, and

    score(image, domain) = log sum_c exp(logit_c)

which is weaker: how large a network's logits are depends on much besides the image. Measured by
benchmarks/auto_domain.py.

From images and a domain's name to logits: library, cache and batcher at work together.

It knows nothing of HTTP, and is what a worker process and a Ray replica have in common.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from polymask.core.base import Base
from polymask.core.merge import give_back_freed_memory
from polymask.core.network import structural_copy, tensor_of
from polymask.library.cache import MergedCache
from polymask.serve.batcher import Batcher
from polymask.serve.library import Entry, Library, PackReplaced
from polymask.serve.requests import crops_of, feed_of
from polymask.serve.settings import Refusal, Settings
from polymask.train.predict import likeness_cosines, logits

Rule = Literal["likeness", "logits"]


@dataclass(frozen=True)
class Ranked:
    """One domain's score for one image, larger is better."""

    entry: Entry
    score: float


def rank(entries: Sequence[Entry], scores: Tensor) -> list[list[Ranked]]:
    """For every image the domains, the likeliest first, of scores (N, domains).

    Equal scores stay in the order of `entries`.
    """
    orders = scores.argsort(dim=1, descending=True, stable=True).tolist()
    return [
        [Ranked(entries[place], float(row[place])) for place in order]
        for order, row in zip(orders, scores.tolist(), strict=True)
    ]


def by_likeness(features: Tensor, entries: Sequence[Entry]) -> Tensor:
    """Scores (N, domains) of the base's features (N, size)."""
    likenesses = [entry.likeness for entry in entries if entry.likeness is not None]
    return likeness_cosines(features, torch.stack(likenesses))


def by_logits(logits: Sequence[Tensor]) -> Tensor:
    """Scores (N, domains) of what each domain says, (N, its classes)."""
    return torch.stack([one.logsumexp(1) for one in logits], 1)


R = TypeVar("R")

_LOOKS = 5  # at a pack that is replaced while it is loaded
_MERGED = 16  # networks, after which memory of dropped ones is given back


@dataclass(frozen=True, eq=False)
class Answer:
    """What one version of a domain says of images."""

    entry: Entry
    logits: Tensor  # (N, classes)
    warm: bool  # its network was there already

    def row(self, place: int) -> "Answer":
        """The answer for one of the images."""
        return replace(self, logits=self.logits[place : place + 1])


@dataclass(frozen=True)
class Best:
    """For each image the domains in order, and what the first of them says."""

    rule: Rule
    rankings: list[list[Ranked]]
    answers: list[Answer]


class Features:
    """The base itself, run for its features; with module objects that any thread may call."""

    key = "base"  # domains' keys hold an @

    def __init__(self, base: Base) -> None:
        self.net, self.input = structural_copy(base.net), base.input


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
        self.library = Library(settings.library, base, max_side=settings.max_side, forget=self.cache.drop)
        self._features = Features(base)
        self.batcher: Batcher[Entry | Features] = Batcher(
            self._run,
            window=settings.window,
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            runners=settings.runners,
            observe=observe,
        )
        self._aside = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="polymask-aside")
        self._tidied = 0  # networks that had been merged when memory was last given back

    async def predict(self, name: str, images: Sequence[bytes]) -> Answer:
        """What a domain says of image files."""
        with self.batcher.room_for(len(images)):
            return await self._in_time(self._predict(name, images))

    async def predict_best(self, names: Sequence[str] | None, images: Sequence[bytes]) -> Best:
        """What the domain that fits best says of each image; of all domains where none is named.

        A domain that vanishes or cannot be loaded meanwhile is left out.
        """
        entries = await self.aside(self._several, names)
        if not entries:
            raise Refusal(404, "the library has no domain to compare")
        if all(entry.likeness is not None for entry in entries):
            with self.batcher.room_for(2 * len(images)):
                return await self._in_time(self._best_by_likeness(entries, images))
        self._check_cost(len(entries), len(images))
        with self.batcher.room_for(len(images) * len(entries)):
            return await self._in_time(self._best_by_logits(entries, images))

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

    async def _best_by_likeness(self, entries: list[Entry], images: Sequence[bytes]) -> Best:
        spec = self._features.input
        crops = await self.aside(crops_of, spec, images, self.settings.max_pixels)
        features = await self.batcher.submit(self._features, crops)
        for _ in range(_LOOKS):
            rankings = rank(entries, by_likeness(features, entries))
            rows: dict[str, list[int]] = {}
            for row, ranking in enumerate(rankings):
                rows.setdefault(ranking[0].entry.name, []).append(row)
            asked = (self._predict(name, [images[i] for i in where]) for name, where in rows.items())
            found = dict(zip(rows, await asyncio.gather(*asked, return_exceptions=True), strict=True))
            gone = {name for name, answer in found.items() if isinstance(answer, Refusal)}
            if not gone:
                return Best("likeness", rankings, _in_order(rows, found, len(images)))
            entries = [entry for entry in entries if entry.name not in gone]
            if not entries:
                break
        raise Refusal(503, "no domain could answer", headers={"Retry-After": "1"})

    async def _best_by_logits(self, entries: list[Entry], images: Sequence[bytes]) -> Best:
        answers = await self._ask_all(entries, images)
        if not answers:
            raise Refusal(503, "no domain could answer", headers={"Retry-After": "1"})
        scores = by_logits([answer.logits for answer in answers])
        rankings = rank([answer.entry for answer in answers], scores)
        said = {answer.entry.name: answer for answer in answers}
        best = [said[ranking[0].entry.name].row(row) for row, ranking in enumerate(rankings)]
        return Best("logits", rankings, best)

    async def _ask_all(self, entries: list[Entry], images: Sequence[bytes]) -> list[Answer]:
        """What each domain says, without those that cannot."""
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
        return answers

    def _check_cost(self, domains: int, images: int) -> None:
        most, queue = self.settings.auto_domains, self.settings.max_queue
        if domains > most:
            raise Refusal(
                422,
                f"{domains} domains are too many to compare by running each; name up to {most} in `domains`",
            )
        if domains * images > queue:
            raise Refusal(
                422,
                f"{images} images for {domains} domains are {domains * images} runs of networks; "
                f"{queue} are allowed: send fewer images or name some `domains`",
            )

    def _several(self, names: Sequence[str] | None) -> list[Entry]:
        if names is None:
            return self.library.entries()
        return [self.library.find(name) for name in dict.fromkeys(names)]

    def _prepare(self, name: str, images: Sequence[bytes]) -> tuple[Entry, Tensor]:
        entry = self.library.find(name)
        return entry, crops_of(entry.input, images, self.settings.max_pixels)

    @torch.no_grad()
    def _run(self, target: "Entry | Features", crops: Tensor) -> Tensor:
        images = self.base.placed(feed_of(target.input).batch(crops))
        if isinstance(target, Features):
            return tensor_of(target.net(images)).cpu()
        with self.cache.use(target.key, partial(self.library.load, target)) as net:
            found = logits(net, images).cpu()
        self._tidy()
        if not torch.isfinite(found).all():
            self.library.reject(target, "its network gives values that are not finite")
            raise Refusal(409, f"the network of {target.name} gives values that are not finite")
        return found

    def _tidy(self) -> None:
        merged = self.cache.stats.misses
        if merged - self._tidied >= _MERGED:
            self._tidied = merged
            give_back_freed_memory()


def _in_order(rows: dict[str, list[int]], found: Mapping[str, Answer | BaseException], count: int) -> list[Answer]:
    """One answer for each image, of those that several domains gave for some of them."""
    placed: dict[int, Answer] = {}
    for name, where in rows.items():
        answer = found[name]
        if isinstance(answer, BaseException):
            raise answer
        placed |= {row: answer.row(place) for place, row in enumerate(where)}
    return [placed[row] for row in range(count)]
