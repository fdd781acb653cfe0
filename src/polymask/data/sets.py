"""Sets of (image, label) that a caller holds: a torch Dataset, a Hugging Face table, a list; their labels and names."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset

from polymask.data.images import TRAIN_VAL_TEST, DomainData, some, stratified
from polymask.data.libraries import ROLES, domain_of
from polymask.data.split import Split, WrappedSplit
from polymask.errors import DataError

_IMAGES = ("image", "images", "img", "pixel_values", "photo")
_LABELS = ("label", "labels", "target", "targets", "class", "fine_label")


def title_of(source: Any) -> str:
    """What to call a set or a loader."""
    inside = source.dataset if isinstance(source, DataLoader | Subset) else None
    return type(source).__name__ if inside is None else f"{type(source).__name__} of {title_of(inside)}"


def is_map_style(source: Any) -> bool:
    """Whether items of a set can be had by number."""
    numbered = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    return numbered and not isinstance(source, str | Mapping | IterableDataset)


def is_raw(image: Any) -> bool:
    """Whether an image is still to be made what a network takes: anything but a float tensor."""
    return not (isinstance(image, Tensor) and image.is_floating_point())


def pair_of(item: Any, source: Any) -> tuple[Any, Any]:
    """(image, label) of what a set or a loader gives: a pair, or a dict with a column of each."""
    if isinstance(item, Mapping):
        return item[_column(item, source, _IMAGES, "Image")], item[_column(item, source, _LABELS, "ClassLabel")]
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    what = f"{len(item)} things" if isinstance(item, tuple | list) else f"a {type(item).__name__}"
    raise DataError(f"{title_of(source)} gives {what}; give (image, label), or a dict with an image and a label")


def _column(item: Mapping[str, Any], source: Any, usual: Sequence[str], kind: str) -> str:
    """The column with a usual name, or the one of a Hugging Face type."""
    features = getattr(source, "features", None) or {}
    typed = [name for name, feature in features.items() if type(feature).__name__ == kind]
    found = [name for name in (*usual, *typed) if name in item]
    if not found:
        raise DataError(f"{title_of(source)} has the columns {some(list(item))}; call the right one {usual[0]!r}")
    return str(found[0])


def class_names(source: Any) -> list[str] | None:
    """The names that a set gives its labels, where it does."""
    if isinstance(source, DataLoader | Subset):
        return class_names(source.dataset)
    if isinstance(source, ConcatDataset):
        return class_names(source.datasets[0])
    features = getattr(source, "features", None)
    if isinstance(features, Mapping):
        named = [name for name in (*_LABELS, *features) if type(features.get(name)).__name__ == "ClassLabel"]
        return list(features[named[0]].names) if named else None
    names = getattr(source, "classes", None)
    if not isinstance(names, list | tuple):
        return None
    return [name if isinstance(name, str) else ", ".join(map(str, name)) for name in names]


class LabelNames:
    """From a set's labels to positions in a domain's classes: by name where both have names, else by number."""

    def __init__(self, source: Any, classes: Sequence[str] | None) -> None:
        self.title, self.classes = title_of(source), None if classes is None else list(classes)
        self.theirs = class_names(source)
        self.places: Tensor | None = None
        if self.classes and self.theirs and self.theirs != self.classes and {*self.theirs} & {*self.classes}:
            place = {name: number for number, name in enumerate(self.classes)}
            self.places = torch.tensor([place.get(name, -1) for name in self.theirs])

    def numbers(self, labels: Any) -> Tensor:
        """Labels (N,) as positions; labels that are no class numbers (vectors, fractions) stay as they are."""
        values = labels if isinstance(labels, Tensor) else list(labels)
        if not isinstance(values, Tensor) and values and isinstance(values[0], str):
            place = {name: number for number, name in enumerate(self.classes or [])}
            if unknown := sorted(set(values) - set(place)):
                raise DataError(f"{self.title} has labels {some(unknown)}, which are no classes of the domain")
            values = [place[value] for value in values]
        if not isinstance(values, Tensor):
            values = torch.stack([torch.as_tensor(value) for value in values])
        if values.ndim != 1 or values.is_floating_point():
            return values
        values = values.long()
        count = len(self.places) if self.places is not None else len(self.classes or []) or None
        low, high = (int(bound) for bound in values.aminmax())
        if low < 0 or (count is not None and high >= count):
            raise DataError(f"{self.title} has labels from {low} to {high} for {count} classes; number them from 0")
        if self.places is None:
            return values
        places = self.places[values]
        if bool((places < 0).any()):
            lacking = self.theirs[int(values[places < 0][0])] if self.theirs else ""
            raise DataError(f"{self.title} has images of {lacking!r}, which is no class of the domain")
        return places


def labels_of(source: Any) -> list[Any]:
    """The label of every item, from where a set keeps them, or read with the images."""
    features = getattr(source, "features", None)
    if isinstance(features, Mapping):
        return list(source[_column(features, source, _LABELS, "ClassLabel")])
    if isinstance(source, Subset):
        inside = labels_of(source.dataset)
        return [inside[index] for index in source.indices]
    kept = getattr(source, "targets", None)
    if kept is not None and len(kept) == len(source) and getattr(source, "target_transform", None) is None:
        return list(kept)
    return [pair_of(source[index], source)[1] for index in range(len(source))]


def set_split(source: Any, names: LabelNames) -> Split:
    """A set of Pillow images or uint8 pixels as a split; one thread at a time reads it."""
    lock = threading.Lock()

    def read(index: int) -> Any:
        with lock:
            return pair_of(source[index], source)[0]

    made = uuid4().hex  # nobody knows when a set has changed
    return WrappedSplit(title_of(source), read, names.numbers(labels_of(source)).numpy(), lambda: made)


@dataclass(frozen=True)
class ReadySets:
    """Loaders, or sets of float images, that feed a network as they are; any but train may be missing."""

    name: str
    classes: tuple[str, ...]
    train: Any
    val: Any = None
    test: Any = None


def open_sets(parts: Mapping[str, Any], classes: Sequence[str] | None, seed: int) -> DomainData | ReadySets:
    """A domain of what a caller holds as train, val and test; a set alone is cut into train, val and test.

    Sets of Pillow images or uint8 pixels are like any other source of images. `classes` names the classes where the
    data does not.
    """
    if "train" not in parts:
        raise DataError(f"data has {', '.join(parts) or 'no parts'} but no train; give one")
    train = parts["train"]
    for role, part in parts.items():
        if isinstance(part, str) or not (is_map_style(part) or hasattr(part, "__iter__")):
            raise DataError(
                f"{role} is a {type(part).__name__}; give a DataLoader or a Dataset of (image, label), a Hugging Face "
                "dataset, or a dict or tuple of these; a folder or a name stands alone"
            )
        if is_map_style(part) and len(part) == 0:
            raise DataError(f"{role}: the {title_of(part)} is empty; give one with images")
    sets = all(is_map_style(part) for part in parts.values())
    names = list(classes or class_names(train) or [])
    if not names and sets and isinstance(first := labels_of(train), list) and isinstance(first[0], str):
        names = sorted(set(first))
    if not names:
        raise DataError(f"the {title_of(train)} does not name its classes; give classes=[…], one name for each label")
    title = title_of(train)
    if sets and is_raw(pair_of(train[0], train)[0]):
        labelled = {r: part for r, part in parts.items() if r == "train" or not _is_secret(labels_of(part))}
        splits = {role: set_split(part, LabelNames(part, names)) for role, part in labelled.items()}
        return domain_of(title, names, splits, seed)
    if sets and list(parts) == ["train"]:
        numbers = LabelNames(train, names).numbers(labels_of(train))
        cuts = stratified(np.asarray(numbers), TRAIN_VAL_TEST, seed)
        if not all(len(cut) for cut in cuts):
            raise DataError(f"{title}: {len(numbers)} images are too few to cut into train, val and test; give parts")
        parts = {role: Subset(train, cut.tolist()) for role, cut in zip(ROLES, cuts, strict=True)}
    return ReadySets(title, tuple(names), **parts)


def _is_secret(labels: Sequence[Any]) -> bool:
    """Whether a test set comes without its labels, as Hugging Face marks it."""
    return all(label is None or (isinstance(label, int) and label == -1) for label in labels)
