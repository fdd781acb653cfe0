"""A domain's images and labels, checked, whatever source they come from.

Which known sets must not be mirrored: a mirrored digit, letter or sign is another or none.

The paper mirrors neither SVHN, Omniglot and GTSRB nor, for reasons it does not give, the textures
of DTD; rendered text and the other digit sets follow from the same thought.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polymask.data.split import JoinedSplit, Labels, Split, SubsetSplit, WrappedSplit, complete
from polymask.errors import DataError


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

    `test` is None when the source has no labelled test images. `mirror` allows left-right mirroring
    in training. `squash` asks for whole images resized to the network's square, aspect ratio lost,
    as ImageNet-to-Sketch does with its cropped sets. `notes` says what the source decided or left
    out, one sentence each, for a log.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    test: Split | None
    mirror: bool = True
    squash: bool = False
    submission: Submission | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise DataError(
                f"{self.name}: only one class ({', '.join(self.classes)}); a domain needs two or "
                "more, so give the folder whose subfolders are the classes"
            )
        _check_names(self.name, self.classes)
        for part, split in self.splits().items():
            if len(split) == 0:
                raise DataError(f"{self.name}: {part} has no images; add some")
            if split.labels.min() < 0 or split.labels.max() >= len(self.classes):
                raise DataError(
                    f"{self.name}: {part} has labels from {split.labels.min()} to "
                    f"{split.labels.max()} for {len(self.classes)} classes; number them from 0"
                )
        counts = np.bincount(self.train.labels, minlength=len(self.classes))
        lacking = [self.classes[i] for i in np.flatnonzero(counts == 0)]
        if lacking:
            raise DataError(f"{self.name}: no training image of {some(lacking)}; add images or remove the class")

    def splits(self) -> dict[str, Split]:
        """The labelled splits by name."""
        found = {"train": self.train, "val": self.val, "test": self.test}
        return {part: split for part, split in found.items() if split is not None}

    def first_classes(self, count: int) -> DomainData:
        """The domain with its first classes only; it is nothing to submit any more."""
        if count < 2:
            raise DataError(f"{self.name}: {count} classes are too few; keep two or more")
        if count >= len(self.classes):
            return self

        def kept(split: Split) -> Split:
            return SubsetSplit(split, np.flatnonzero(split.labels < count))

        note = f"only the first {count} of {len(self.classes)} classes"
        return replace(
            self,
            classes=self.classes[:count],
            train=kept(self.train),
            val=kept(self.val),
            test=None if self.test is None else kept(self.test),
            submission=None,
            notes=(*self.notes, note),
        )

    @property
    def train_val(self) -> Split:
        """Train and val together, for a final training."""
        return JoinedSplit(self.train, self.val)


def _check_names(name: str, classes: tuple[str, ...]) -> None:
    """Names must stay apart on file systems that ignore case or spell é in another way."""
    seen: dict[str, str] = {}
    for label in classes:
        key = unicodedata.normalize("NFC", label).casefold()
        if key in seen:
            raise DataError(
                f"{name}: classes {seen[key]!r} and {label!r} differ at most by case; merge them or rename one"
            )
        seen[key] = label


def some(names: list[str], most: int = 10) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more


_KEEP = ("svhn", "omniglot", "gtsrb", "dtd", "mnist", "usps", "semeion", "digits", "sst2", "letters")


def may_mirror(name: str) -> bool:
    """Whether left-right mirroring keeps the classes of a set with this name."""
    return not any(word in name.lower() for word in _KEEP)


@dataclass(frozen=True)
class Part:
    """One split as another library has it; see `WrappedSplit`."""

    read: Callable[[int], Any]
    labels: Labels
    fingerprint: Callable[[], str]


def wrap(name: str, classes: Sequence[str], parts: dict[str, Part], seed: int) -> DomainData:
    """Make a domain of `parts`; class names that no image has are dropped."""
    used = np.unique(np.concatenate([part.labels for part in parts.values()]))
    used = used[(used >= 0) & (used < len(classes))]
    splits: dict[str, Split] = {
        role: WrappedSplit(f"{name} {role}", part.read, np.searchsorted(used, part.labels), part.fingerprint)
        for role, part in parts.items()
    }
    splits, notes = complete(splits, seed, name)
    if len(used) < len(classes):
        notes.append(f"dropped {len(classes) - len(used)} class names that no image has")
    return DomainData(
        name,
        tuple(classes[label] for label in used),
        splits["train"],
        splits["val"],
        splits.get("test"),
        mirror=may_mirror(name),
        notes=tuple(notes),
    )
