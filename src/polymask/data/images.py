"""A domain's images: train, val and test, checked, and cut by class where a source lacks one of them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polymask.core.target import CLASSES, Target, strata
from polymask.data.split import JoinedSplit, Labels, Split, SubsetSplit
from polymask.errors import DataError, DomainError
from polymask.files import digest


@dataclass(frozen=True)
class Submission:
    """What a benchmark's server wants to know of each test image.

    The answer for image i with predicted class c is (image_ids[i], category_ids[c]).
    """

    images: Split
    image_ids: NDArray[np.int64]  # (N,), in the order of `images`
    category_ids: NDArray[np.int64]  # (classes,), in the order of the domain's classes


@dataclass(frozen=True)
class DomainData:
    """A domain's images: train, val and test, with class names.

    `target` says what labels are: one class for each image, several labels, or numbers; `classes` are their names.
    `test` is None when the source has no labelled test images. `mirror` allows left-right mirroring in training.
    `squash` asks for whole images resized to the network's square, aspect ratio lost, as ImageNet-to-Sketch does with
    its cropped sets. `notes` says what the source decided or left out, one sentence each, for a log. `seed` is that of
    the cuts, where the source needed some.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    test: Split | None = None
    mirror: bool = True
    squash: bool = False
    submission: Submission | None = None
    notes: tuple[str, ...] = ()
    target: Target = CLASSES
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_names(self.name, self.classes)
        for part, split in self.splits().items():
            if len(split) == 0:
                raise DataError(f"{self.name}: {part} has no images; add some")
            self.target.check(f"{self.name}: {part}", split.labels, self.classes)
        lacking = [self.classes[i] for i in np.flatnonzero(self.target.counts(self.train.labels, self.classes) == 0)]
        if lacking:
            raise DataError(f"{self.name}: no training image of {some(lacking)}; add images or remove the class")

    def splits(self) -> dict[str, Split]:
        """The labelled splits by name."""
        found = {"train": self.train, "val": self.val, "test": self.test}
        return {part: split for part, split in found.items() if split is not None}

    def check_enough(self, fewest: int | None = None) -> None:
        """Raise where there are fewer classes than this; by default than a domain of its own needs."""
        if len(self.classes) < (self.target.fewest if fewest is None else fewest):
            raise DataError(
                f"{self.name}: only one class ({', '.join(self.classes)}); a domain needs two or "
                "more, so give the folder whose subfolders are the classes"
            )

    def with_classes_of(self, classes: Sequence[str]) -> DomainData:
        """The same images, labelled in the order of a domain that has just these classes.

        A folder's are sorted, and a domain that was extended has its new ones last.
        """
        if tuple(classes) == self.classes:
            return self
        place = {name: number for number, name in enumerate(classes)}
        if place.keys() != set(self.classes):
            raise DomainError(
                f"the classes of {self.name} ({some(list(self.classes), 4)}) are not those of the domain "
                f"({some(list(classes), 4)}); give images of the same classes"
            )
        places = np.array([place[name] for name in self.classes])

        def moved(split: Split) -> Split:
            labels = split.labels
            return split.relabelled(places[labels] if labels.ndim == 1 else labels[:, np.argsort(places)])

        test = None if self.test is None else moved(self.test)
        return replace(self, classes=tuple(classes), train=moved(self.train), val=moved(self.val), test=test)

    def first_classes(self, count: int) -> DomainData:
        """The domain with its first classes only, and without a submission."""
        require_classes(self, "keeping the first of them")
        if count < 2:
            raise DataError(f"{self.name}: {count} classes are too few; keep two or more")
        if count >= len(self.classes):
            return self

        parts: dict[str, Any] = {
            name: SubsetSplit(s, np.flatnonzero(s.labels < count)) for name, s in self.splits().items()
        }
        notes = (*self.notes, f"only the first {count} of {len(self.classes)} classes")
        return replace(self, classes=self.classes[:count], submission=None, notes=notes, **parts)

    @property
    def train_val(self) -> Split:
        """Train and val together, for a final training."""
        return JoinedSplit(self.train, self.val)


def require_classes(data: DomainData, what: str) -> None:
    """Raise unless a domain has one class for each image; `what` needs that."""
    if data.target.kind != "classes":
        raise DataError(f"{what} is for images of one class each; those of {data.name} have {data.target.kind}")


def _check_names(name: str, classes: tuple[str, ...]) -> None:
    """Names must stay apart on file systems that ignore case or spell é in another way."""
    seen: dict[str, str] = {}
    for label in classes:
        key = plain_name(label)
        if key in seen:
            raise DataError(
                f"{name}: classes {seen[key]!r} and {label!r} differ at most by case; merge them or rename one"
            )
        seen[key] = label


def plain_name(name: str) -> str:
    """What two names have in common that some file systems take for one."""
    return unicodedata.normalize("NFC", name).casefold()


def some(names: list[str], most: int = 10) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more


# A mirrored digit, letter or sign is another or none. The paper does not mirror SVHN, Omniglot and
# GTSRB, nor, for reasons that it does not give, DTD's textures; the others follow from the same thought.
_NEVER_MIRRORED = ("svhn", "omniglot", "gtsrb", "dtd", "mnist", "usps", "semeion", "digits", "sst2", "letters")


def may_mirror(name: str) -> bool:
    """Whether left-right mirroring keeps the classes of a set with this name."""
    return not any(word in name.lower() for word in _NEVER_MIRRORED)


TRAIN_VAL_TEST = (0.70, 0.15, 0.15)
TRAIN_VAL = (0.85, 0.15)


def stratified(labels: Labels, shares: Sequence[float], seed: int) -> list[NDArray[np.int64]]:
    """Deal the indices of `labels` into parts, class by class.

    A part with share f gets floor(f n) or ceil(f n) of a class's n images, and the first part at
    least one. Each class is dealt by random numbers that its label decides: adding a class leaves
    those with smaller labels where they were. Indices are sorted within a part.
    """
    dealt: list[list[NDArray[np.int64]]] = [[] for _ in shares]
    for members, draw in _by_class(labels, seed):
        ends = np.cumsum(_quotas(len(members), shares, draw))
        for part, piece in zip(dealt, np.split(members, ends[:-1]), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)) for part in dealt]


def _by_class(labels: Labels, seed: int) -> Iterator[tuple[NDArray[np.int64], np.random.Generator]]:
    """The places of each class in a random order, and the random numbers of that class."""
    for label in np.unique(labels):
        draw = np.random.default_rng([seed, int(label) + 1])
        yield draw.permutation(np.flatnonzero(labels == label)), draw


def _quotas(count: int, shares: Sequence[float], draw: np.random.Generator) -> NDArray[np.int64]:
    """Whole numbers that add up to `count`, by largest remainder, ties by lot."""
    exact = np.asarray(shares) * count
    quotas = np.floor(exact + 1e-9).astype(np.int64)
    remainders = np.round(exact - quotas, 9)
    order = np.lexsort((draw.random(len(shares)), -remainders))
    quotas[order[: count - int(quotas.sum())]] += 1
    return quotas


def cut(split: Split, shares: Sequence[float], seed: int, name: str) -> list[Split]:
    """Cut a split into stratified parts, none of them empty."""
    labels = strata(split.labels)
    dealt = stratified(labels, shares, seed)
    for place in (place for place, part in enumerate(dealt) if not len(part)):  # few images may fall to other parts
        largest = max(range(len(dealt)), key=lambda other: len(dealt[other]))
        there, counts = np.unique(labels[dealt[largest]], return_counts=True)
        if counts.max() < 2:
            raise DataError(
                f"{name}: {len(split)} images in {len(np.unique(labels))} classes are too few to "
                f"cut into {len(dealt)} parts; give at least 4 images of each class"
            )
        moved = np.flatnonzero(labels[dealt[largest]] == there[counts.argmax()])[-1:]
        dealt[place], dealt[largest] = dealt[largest][moved], np.delete(dealt[largest], moved)
    return [SubsetSplit(split, indices) for indices in dealt]


Parts = tuple[Split, Split, Split | None]  # train, val and test


def complete(parts: Mapping[str, Split], seed: int, name: str) -> tuple[Parts, list[str]]:
    """Cut the parts that a source lacks out of its train, and say so.

    Train alone is cut 70 / 15 / 15; train with test gives 15 % of itself to val; train with val has no test.
    """
    if "val" in parts:
        return (parts["train"], parts["val"], parts.get("test")), []
    if "test" in parts:
        train, val = cut(parts["train"], TRAIN_VAL, seed, name)
        return (train, val, parts["test"]), [f"val is 15 % of each class of train (seed {seed})"]
    train, val, test = cut(parts["train"], TRAIN_VAL_TEST, seed, name)
    note = f"cut into train, val and test by 70, 15 and 15 % of each class (seed {seed})"
    return (train, val, test), [note]


_LOOKED_AT, _GRID = 16, 4


def looks_of(split: Split) -> dict[str, str]:
    """What tells images from others: a digest of their labels, and some of them as greys on a coarse grid, in hex."""
    places = np.linspace(0, len(split) - 1, min(len(split), _LOOKED_AT)).astype(int)
    greys = [np.asarray(split.image(int(p), 32).convert("L").resize((_GRID, _GRID), resample=4)) for p in places]
    return {"labels": digest(split.labels.tobytes()), "greys": np.stack(greys).tobytes().hex()}


def same_looks(one: Any, other: Mapping[str, str]) -> bool:
    """Whether such a note is of the same images as another; decoders differ a little."""
    if not isinstance(one, Mapping) or one.get("labels") != other["labels"]:
        return False
    if not isinstance(greys := one.get("greys"), str) or len(greys) != len(other["greys"]):
        return False
    try:
        then, now = (np.frombuffer(bytes.fromhex(text), np.uint8).astype(int) for text in (greys, other["greys"]))
    except ValueError:
        return False
    return int(abs(then - now).max()) <= 3


def limited(split: Split, limit: int, seed: int, name: str) -> Split:
    """At most `limit` images, in proportion to the classes and at least one of each.

    A larger limit keeps the images of a smaller one.
    """
    if limit >= len(split):
        return split
    groups = strata(split.labels)
    classes = len(np.unique(groups))
    if limit < classes:
        raise DataError(f"{name}: limit {limit} is below its {classes} classes; raise the limit")
    ranks = np.empty(len(split), dtype=np.float64)  # any prefix in this order is stratified
    for members, _ in _by_class(groups, seed):
        ranks[members] = (np.arange(len(members)) + 0.5) / len(members)
        ranks[members[0]] = 0
    return SubsetSplit(split, np.sort(np.argsort(ranks, kind="stable")[:limit]))
