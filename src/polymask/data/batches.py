"""Batches, and what other libraries call so: DataLoaders, Datasets and Hugging Face tables, the same ones every time.

A map-style set repeats to the bit. The order of an epoch comes from (seed, epoch), and what is random in a batch from
(seed, epoch, number of the batch). So the number of workers does not matter, and a run that goes on skips the batches
that are done without reading them. A stream can only be read from its beginning, so a run on it cannot go on.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from polymask.core.input import InputSpec
from polymask.data.cache import cache_splits
from polymask.data.libraries import ROLES
from polymask.data.loader import Loader
from polymask.data.preprocess import Preprocess
from polymask.data.sets import LabelNames, is_map_style, is_raw, pair_of, set_split, title_of
from polymask.errors import DataError, TrainingError

Pair = tuple[Tensor, Tensor]

_ORDER, _BATCH = 3, 4  # keep these random numbers apart from each other, and from those of a Loader


@runtime_checkable
class Batches(Protocol):
    """Where images come from: the same batches for the same epoch, every time."""

    def __len__(self) -> int:
        """Batches in an epoch."""

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Pair]:
        """(images (N, C, H, W), labels (N,)) of an epoch, from batch `start` on."""


def parts_of(data: Any) -> dict[str, Any]:
    """Train, val and test of a dict with these names (or Hugging Face's), or of a tuple in this order."""
    if isinstance(data, tuple) and 1 < len(data) < 4:
        return {role: part for role, part in zip(ROLES, data, strict=False) if part is not None}
    if not isinstance(data, Mapping):
        return {"train": data}
    known = {alias: role for role, aliases in ROLES.items() for alias in aliases}
    if unknown := [str(name) for name in data if name not in known]:
        raise DataError(f"{unknown[0]!r} is not a part of data; name the parts train, val and test")
    return {known[name]: part for name, part in data.items() if part is not None}


def as_batches(
    source: Any,
    spec: InputSpec,
    classes: Sequence[str] | None,
    *,
    batch_size: int = 64,
    seed: int = 0,
    augment: Callable[[], Preprocess] | None = None,
    resume: bool = False,
) -> Batches:
    """Batches of what gives (image, label): a DataLoader, a Dataset, a Hugging Face table; batches stay as they are.

    Float images are taken as they come. Pillow images and uint8 pixels are fed by `spec`, and where a Dataset gives
    these, `augment` says how training crops them. With `augment` a Dataset is shuffled, and float images may have
    another size than the spec's, which `Adapted.spec` then has. `resume` raises where batches cannot be repeated.
    """
    if isinstance(source, Batches):
        return source
    names = LabelNames(source, classes)
    if isinstance(source, DataLoader):
        stream = not is_map_style(source.dataset)
    else:
        stream = not is_map_style(source)
        if isinstance(source, str) or (stream and not hasattr(source, "__iter__")):
            raise DataError(
                f"a {type(source).__name__} gives no batches; give a DataLoader or a Dataset of (image, label), a "
                "Hugging Face dataset, or a dict or tuple of train, val and test"
            )
    adapted: Adapted
    if stream:
        if resume:
            raise TrainingError(
                f"training on the {title_of(source)} cannot be resumed: a stream can only be read from its beginning; "
                "give a Dataset with a length and items by number, or train without resume"
            )
        made = source if isinstance(source, DataLoader) else DataLoader(source, batch_size, collate_fn=list)
        adapted = Stream(made, spec, names)
    elif isinstance(source, DataLoader):
        adapted = MapStyle(source, spec, names, seed)
        if resume and adapted.order(0) != adapted.order(0):
            raise TrainingError(
                f"training on the {title_of(source)} cannot be resumed: its sampler gives another order each time; "
                "let it draw from torch's random numbers, or train without resume"
            )
    else:
        if len(source) == 0:
            raise DataError(f"the {title_of(source)} is empty; give one with images")
        if is_raw(pair_of(source[0], source)[0]):
            transform = Preprocess(spec) if augment is None else augment()
            (cache,) = cache_splits([set_split(source, names)], transform.shrink)
            return Loader(cache, transform, batch_size=batch_size, seed=seed, shuffle=augment is not None)
        sampler = _Chunks(len(source), batch_size, shuffle=augment is not None)
        adapted = MapStyle(DataLoader(source, batch_sampler=sampler, collate_fn=list), spec, names, seed)
    adapted.look(any_size=augment is not None)
    return adapted


class Adapted(Batches, ABC):
    """Batches of another library's loader, as the network takes them."""

    def __init__(self, loader: DataLoader[Any], spec: InputSpec, names: LabelNames) -> None:
        self.loader, self.spec, self.names = loader, spec, names
        self.transform = Preprocess(spec)

    @abstractmethod
    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Pair]:
        """(images, labels) of an epoch, from batch `start` on."""

    def look(self, *, any_size: bool) -> None:
        """Look at the first batch: raise where it is no batch of images; with `any_size` take its size as the spec's.

        Random numbers go on as if nothing had been read.
        """
        with drawn_from(0):
            first = next(iter(self.batches()), None)
        if first is None:
            raise DataError(f"the {title_of(self.loader)} gives no batch; give one with images")
        images = first[0]
        if any_size and images.ndim == 1 + len(self.spec.shape) and images.shape[1] == self.spec.shape[0]:
            self.spec = replace(self.spec, shape=tuple(images.shape[1:]))
            self.transform = Preprocess(self.spec)
        self.spec.check_batch(images, "the domain")

    def pair(self, batch: Any) -> Pair:
        """A batch as the network takes it, from what a loader gives: a list of items where we made it."""
        if self.loader.collate_fn is list:
            pairs = [pair_of(item, self.loader.dataset) for item in batch]
            images: Any = [self._ready(image) for image, _ in pairs]
            labels: Any = [label for _, label in pairs]
            if len({image.shape for image in images}) > 1:
                sizes = f"the {title_of(self.loader.dataset)} gives images of several sizes"
                raise DataError(f"{sizes}; resize them to {self.spec.size}")
            images = torch.stack(images)
        else:
            images, labels = pair_of(batch, self.loader.dataset)
            images = images if isinstance(images, Tensor) else torch.stack([self._ready(image) for image in images])
        if images.dtype == torch.uint8:
            images = torch.stack([self.transform(image) for image in images])
        found = self.names.numbers(labels)
        if len(found) != len(images):
            raise DataError(f"the {title_of(self.loader)} gives {len(found)} labels for {len(images)} images")
        return images, found

    def _ready(self, image: Any) -> Tensor:
        ready = isinstance(image, Tensor) and image.is_floating_point()
        return image if ready else self.transform(image)


class Stream(Adapted):
    """Batches of an iterable set: in its own order, from its beginning."""

    _length: int | None = None

    def __len__(self) -> int:
        """Batches in an epoch; where the set does not know, they are counted once, by reading it."""
        if self._length is None:
            try:
                self._length = len(self.loader)
            except TypeError:
                self._length = sum(1 for _ in self.loader)
        return self._length

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Pair]:
        if start:
            raise TrainingError(f"a {title_of(self.loader)} can only be read from its start, not from batch {start}")
        _tell_epoch(self.loader.dataset, epoch)
        return map(self.pair, _explained(self.loader))


class MapStyle(Adapted):
    """Batches of a set whose items have numbers: the same for the same seed and epoch."""

    def __init__(self, loader: DataLoader[Any], spec: InputSpec, names: LabelNames, seed: int) -> None:
        super().__init__(loader, spec, names)
        self.seed = seed
        self.batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 1)

    def __len__(self) -> int:
        return len(self.loader)

    def order(self, epoch: int) -> list[Any]:
        """The items of each batch of an epoch, by number."""
        loader = self.loader
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        chain = [sampler]
        while (inner := getattr(chain[-1], "sampler", None)) is not None:
            chain.append(inner)
        own = {id(g): g for g in (getattr(s, "generator", None) for s in chain) if isinstance(g, torch.Generator)}
        before = [generator.get_state() for generator in own.values()]
        with drawn_from(_ORDER, self.seed, epoch):
            for generator in own.values():
                generator.manual_seed(torch.initial_seed())
            for each in chain:
                _tell_epoch(each, epoch)
            try:
                return [list(batch) if isinstance(batch, list | tuple) else batch for batch in sampler]
            finally:
                for generator, state in zip(own.values(), before, strict=True):
                    generator.set_state(state)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Pair]:
        keys = [((_BATCH, self.seed, epoch, number), batch) for number, batch in enumerate(self.order(epoch))]
        theirs, options = self.loader, {}
        if theirs.num_workers:
            for name in ("num_workers", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "timeout"):
                options[name] = getattr(theirs, name)
        again: DataLoader[Any] = DataLoader(
            _Drawn(theirs.dataset, theirs.collate_fn),
            batch_size=None,
            sampler=keys[start:],
            collate_fn=_as_it_is,
            pin_memory=theirs.pin_memory,
            generator=torch.Generator().manual_seed(0),  # so that it leaves torch's own alone
            **options,
        )
        return map(self.pair, _explained(again))


class _Drawn(Dataset[Any]):
    """The batches of a set, each with its own random numbers, here and in a worker."""

    def __init__(self, items: Any, collate: Any) -> None:
        self.items, self.collate = items, collate

    def __getitem__(self, key: tuple[tuple[int, ...], Any]) -> Any:
        numbers, batch = key
        with drawn_from(*numbers):
            if not isinstance(batch, list):
                return self.collate(self.items[batch])
            at_once = getattr(self.items, "__getitems__", None)
            return self.collate([self.items[index] for index in batch] if at_once is None else at_once(batch))


class _Chunks:
    """Numbers of items by batches; a last batch of one, which batch norm cannot use, joins the one before."""

    def __init__(self, count: int, batch_size: int, *, shuffle: bool) -> None:
        self.count, self.batch_size, self.shuffle = count, batch_size, shuffle

    def __len__(self) -> int:
        full, rest = divmod(self.count, self.batch_size)
        return full + (rest > 0 and not self._joins)

    @property
    def _joins(self) -> bool:
        return self.shuffle and self.count > self.batch_size > 1 and self.count % self.batch_size == 1

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.count).tolist() if self.shuffle else list(range(self.count))
        for number in range(len(self)):
            last = number == len(self) - 1
            yield order[number * self.batch_size : None if last else (number + 1) * self.batch_size]


@contextmanager
def drawn_from(*numbers: int) -> Iterator[None]:
    """Whatever is random in here depends on these numbers alone; afterwards it goes on as if nothing had been drawn."""
    seeds = [int(seed) for seed in np.random.SeedSequence(numbers).generate_state(3)]
    before, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.default_generator.manual_seed(seeds[0])  # torch.manual_seed would change a GPU's too
            random.seed(seeds[1])
            np.random.seed(seeds[2])
            yield
        finally:
            random.setstate(before)
            np.random.set_state(arrays)


def _explained(loader: DataLoader[Any]) -> Iterator[Any]:
    """What a loader gives; torch's word for images that it cannot stack is made ours."""
    try:
        yield from loader
    except TypeError as error:
        if "default_collate" not in str(error):
            raise
        raise DataError(
            f"a DataLoader cannot make batches of what its dataset gives ({str(error).partition(';')[0]}); give the "
            "Dataset itself, or let the domain's input.transform() make tensors"
        ) from error


def _tell_epoch(thing: Any, epoch: int) -> None:
    """Sampler and streams that ask for the epoch get it."""
    tell = getattr(thing, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def _as_it_is(batch: Any) -> Any:
    return batch
