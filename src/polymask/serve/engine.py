"""From images and the name of a domain, or of none, to logits: library, cache and batcher together.

It knows nothing of HTTP; a worker process and a Ray replica have it in common. Where no domain is
named, the one that fits an image best answers. If every domain that is compared has a likeness in
its pack, this goes by the base's own feature f(image):

    score(image, domain) = cos(f(image), likeness of the domain)

one run of the base, however many domains there are. Otherwise every domain's network is run, and

    score(image, domain) = log sum_c exp(logit_c)

which is weaker: how large a network's logits are depends on much besides the image. Measured by
benchmarks/auto_domain.py.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from polymask.core.base import Base
from polymask.core.input import InputSpec
from polymask.core.merge import give_back_freed_memory
from polymask.core.network import structural_copy, tensor_of
from polymask.core.unknown import split_score
from polymask.data.preprocess import Preprocess
from polymask.library.cache import MergedCache, Source
from polymask.serve.batcher import Batcher, Observe, observe_nothing
from polymask.serve.decoding import Bounds, Decoders
from polymask.serve.library import Entry, Library, PackReplaced
from polymask.serve.settings import Refusal, Settings
from polymask.train.predict import likeness_cosines, logits

Rule = Literal["likeness", "logits"]
Ranking = list[tuple[Entry, float]]  # domains with their scores for one image, the best first
R = TypeVar("R")

_GONE = (404, 409)  # of a domain that cannot answer
_LOOKS = 5  # at a pack that is replaced while it is loaded
_MERGED = 16  # networks, after which memory of dropped ones is given back


def raise_unless_gone(error: BaseException) -> None:
    """Raise unless this says that a domain cannot answer: one that is only busy must not leave it to a worse one."""
    if not isinstance(error, Refusal) or error.status not in _GONE:
        raise error


@lru_cache(maxsize=256)
def preprocess_of(spec: InputSpec) -> Preprocess:
    """How images are fed by a spec; libraries have few different ones."""
    return Preprocess(spec)


def rank(entries: Sequence[Entry], scores: Tensor) -> list[Ranking]:
    """For every image the ranking by scores (N, domains); equal ones stay in the order of `entries`."""
    values, places = scores.sort(dim=1, descending=True, stable=True)
    found = zip(places.tolist(), values.tolist(), strict=True)
    return [[(entries[place], score) for place, score in zip(*image, strict=True)] for image in found]


def by_logits(logits: Sequence[Tensor]) -> Tensor:
    """Scores (N, domains) of what each domain says, (N, its classes)."""
    return torch.stack([one.logsumexp(1) for one in logits], 1)


@dataclass(frozen=True, eq=False)
class Answer:
    """What one version of a domain says of images."""

    entry: Entry
    outputs: Tensor  # (N, classes), and a column of scores where it has a rule for unknown images
    warm: bool  # its network was there already

    @property
    def logits(self) -> Tensor:
        """(N, classes)."""
        return split_score(self.outputs, len(self.entry.classes))[0]

    def row(self, place: int) -> "Answer":
        """The answer for one of the images."""
        return replace(self, outputs=self.outputs[place : place + 1])


@dataclass(frozen=True)
class Best:
    """For each image the domains in order, and what the first of them says."""

    rule: Rule
    rankings: list[Ranking]
    answers: list[Answer]


class Features:
    """The base itself, run for its features; with module objects that any thread may call."""

    key = "base"  # domains' keys hold an @

    def __init__(self, base: Base) -> None:
        self.net, self.input = structural_copy(base.net), base.input


class Engine:
    """One base and a library, ready for requests. Use it in one event loop."""

    def __init__(self, settings: Settings, base: Base, observe: Observe = observe_nothing) -> None:
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
        self.decoders = Decoders(
            Bounds(max_pixels=settings.max_pixels, seconds=settings.decode_seconds, memory=settings.decode_bytes),
            settings.decoders,
        )
        self._aside = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="polymask-aside")
        self._tidied = 0  # networks that had been merged when memory was last given back

    async def predict(self, name: str, images: Sequence[bytes | bytearray]) -> Answer:
        """What a domain says of image files."""
        with self.batcher.room_for(len(images)):
            return await self._in_time(self._predict(name, images))

    async def predict_best(self, names: Sequence[str] | None, images: Sequence[bytes | bytearray]) -> Best:
        """What the domain that fits best says of each image; by default all domains are compared.

        A domain that vanishes or cannot be loaded meanwhile is left out.
        """
        entries = await self.aside(self._entries, names)
        if not entries:
            raise Refusal(404, "the library has no domain to compare")
        if all(entry.likeness is not None for entry in entries):
            with self.batcher.room_for(2 * len(images)):
                return await self._in_time(self._best_by_likeness(entries, images))
        entries = [entry for entry in entries if entry.target.kind == "classes"]  # how sure is each of its classes?
        if not entries:
            raise Refusal(422, "domains of labels or values cannot be compared without a likeness; name one `domain`")
        most, runs, allowed = self.settings.auto_domains, len(entries) * len(images), self.settings.max_queue
        if len(entries) > most:
            message = f"{len(entries)} domains are too many to compare by running each; name up to {most} in `domains`"
            raise Refusal(422, message)
        if runs > allowed:
            message = f"{len(images)} images for {len(entries)} domains are {runs} runs of networks; {allowed} are "
            raise Refusal(422, message + "allowed: send fewer images or name some `domains`")
        with self.batcher.room_for(runs):
            return await self._in_time(self._best_by_logits(entries, images))

    async def aside(self, work: Callable[..., R], *arguments: object) -> R:
        """Run what may take long, or wait for a disk, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._aside, work, *arguments)

    async def close(self) -> None:
        """Finish what is under way, then stop the threads."""
        await self.batcher.close()
        await self.decoders.close()
        self._aside.shutdown()

    async def _in_time(self, work: Coroutine[Any, Any, R]) -> R:
        seconds = self.settings.timeout
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError as error:
            raise Refusal(503, f"no answer within {seconds:g} s; try again later", retry=5) from error

    async def _predict(self, name: str, images: Sequence[bytes | bytearray]) -> Answer:
        for _ in range(_LOOKS):
            entry = await self.aside(self.library.find, name)
            crops = await self._crops(entry, images)
            warm = entry.key in self.cache
            try:
                return Answer(entry, await self.batcher.submit(entry, crops), warm)
            except PackReplaced:
                continue
        raise Refusal(503, f"the pack of {name} changes too fast", retry=1)

    async def _best_by_likeness(self, entries: list[Entry], images: Sequence[bytes | bytearray]) -> Best:
        features = await self.batcher.submit(self._features, await self._crops(self._features, images))
        for _ in range(_LOOKS):
            likenesses = torch.stack([entry.likeness for entry in entries if entry.likeness is not None])
            rankings = rank(entries, likeness_cosines(features, likenesses))
            rows: dict[str, list[int]] = {}  # of the images that a domain fits best
            for row, ranking in enumerate(rankings):
                rows.setdefault(ranking[0][0].name, []).append(row)
            work = (self._predict(name, [images[row] for row in own]) for name, own in rows.items())
            found = await asyncio.gather(*work, return_exceptions=True)
            answers: dict[int, Answer] = {}
            for own, answer in zip(rows.values(), found, strict=True):
                if isinstance(answer, Answer):
                    answers |= {row: answer.row(place) for place, row in enumerate(own)}
                else:
                    raise_unless_gone(answer)
            if len(answers) == len(images):
                return Best("likeness", rankings, [answers[row] for row in range(len(images))])
            gone = {name for name, answer in zip(rows, found, strict=True) if isinstance(answer, Refusal)}
            entries = [entry for entry in entries if entry.name not in gone]
            if not entries:
                break
        raise Refusal(503, "no domain could answer", retry=1)

    async def _best_by_logits(self, entries: list[Entry], images: Sequence[bytes | bytearray]) -> Best:
        answers = await self._predict_all(entries, images)
        if not answers:
            raise Refusal(503, "no domain could answer", retry=1)
        scores = by_logits([answer.logits for answer in answers])
        rankings = rank([answer.entry for answer in answers], scores)
        answer_of = {answer.entry.name: answer for answer in answers}
        best = [answer_of[ranking[0][0].name].row(row) for row, ranking in enumerate(rankings)]
        return Best("logits", rankings, best)

    async def _predict_all(self, entries: list[Entry], images: Sequence[bytes | bytearray]) -> list[Answer]:
        """What each domain says, without those that cannot."""
        crops = {entry.input: await self._crops(entry, images) for entry in {e.input: e for e in entries}.values()}
        warm = {entry.key for entry in entries if entry.key in self.cache}
        work = (self.batcher.submit(entry, crops[entry.input]) for entry in entries)
        answers = []
        for entry, found in zip(entries, await asyncio.gather(*work, return_exceptions=True), strict=True):
            if isinstance(found, Tensor):
                answers.append(Answer(entry, found, entry.key in warm))
            elif not isinstance(found, PackReplaced):
                raise_unless_gone(found)
        return answers

    def _entries(self, names: Sequence[str] | None) -> list[Entry]:
        if names is None:
            return self.library.entries()
        return [self.library.find(name) for name in dict.fromkeys(names)]

    async def _crops(self, target: Entry | Features, images: Sequence[bytes | bytearray]) -> Tensor:
        """Image files as uint8 (N, 3, side, side); a request decodes one at a time, so others have their turn."""
        preprocess = preprocess_of(target.input)

        crops: list[Tensor] = []
        for place, data in enumerate(images):
            try:
                pixels = await self.decoders.decode(data, preprocess.shrink)
            except Refusal as error:
                if len(images) == 1:
                    raise
                raise Refusal(error.status, f"image {place + 1}: {error}") from error
            crops.append(await asyncio.to_thread(preprocess.cut, pixels))
        return torch.stack(crops)

    @torch.no_grad()
    def _run(self, target: Entry | Features, crops: Tensor) -> Tensor:
        images = self.base.placed(preprocess_of(target.input).batch(crops))
        if isinstance(target, Features):
            return tensor_of(target.net(images)).cpu()
        source = Source(target.kind, partial(self.library.load, target))
        with self.cache.use(target.key, source) as net:
            found = logits(net, images).cpu()
        merged = self.cache.stats.misses
        if merged - self._tidied >= _MERGED:
            self._tidied = merged
            give_back_freed_memory()
        if not torch.isfinite(found).all():
            self.library.reject(target.name, target.stamp, "its network gives values that are not finite")
            raise Refusal(409, f"the network of {target.name} gives values that are not finite")
        return found
