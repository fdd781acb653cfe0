"""Seeded splits that keep the classes' proportions."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polymask.data.split import Labels, Split, SubsetSplit
from polymask.errors import DataError

TRAIN_VAL_TEST = (0.70, 0.15, 0.15)
TRAIN_VAL = (0.85, 0.15)


def stratified(labels: Labels, shares: Sequence[float], seed: int) -> list[NDArray[np.int64]]:
    """Deal the indices of `labels` into parts, class by class.

    A part with share f gets floor(f n) or ceil(f n) of a class's n images, and the first part at
    least one. Each class is dealt by its own random numbers, so that adding a class leaves the
    others where they were. Indices are sorted within a part.
    """
    dealt: list[list[NDArray[np.int64]]] = [[] for _ in shares]
    for label in np.unique(labels):
        draw = np.random.default_rng([seed, int(label) + 1])
        members = draw.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(_quotas(len(members), shares, draw))
        for part, piece in zip(dealt, np.split(members, ends[:-1]), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)) for part in dealt]


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
    parts: list[Split] = [SubsetSplit(split, indices) for indices in stratified(split.labels, shares, seed)]
    if not all(len(part) for part in parts):
        raise DataError(
            f"{name}: {len(split)} images in {len(np.unique(split.labels))} classes are too few to "
            f"cut into {len(parts)} parts; give at least 4 images of each class"
        )
    return parts


def complete(parts: dict[str, Split], seed: int, name: str) -> tuple[dict[str, Split], list[str]]:
    """Cut the parts that a source lacks out of its train, and say so.

    Train alone is cut 70 / 15 / 15; train with test gives 15 % of itself to val; train with val
    has no test.
    """
    if "val" in parts:
        return parts, []
    if "test" in parts:
        train, val = cut(parts["train"], TRAIN_VAL, seed, name)
        note = f"val is 15 % of each class of train (seed {seed})"
        return {"train": train, "val": val, "test": parts["test"]}, [note]
    train, val, test = cut(parts["train"], TRAIN_VAL_TEST, seed, name)
    note = f"cut into train, val and test by 70, 15 and 15 % of each class (seed {seed})"
    return {"train": train, "val": val, "test": test}, [note]


def limited(split: Split, limit: int, seed: int, name: str) -> Split:
    """At most `limit` images, in proportion to the classes and at least one of each.

    A larger limit keeps the images of a smaller one.
    """
    if limit >= len(split):
        return split
    classes = len(np.unique(split.labels))
    if limit < classes:
        raise DataError(f"{name}: limit {limit} is below its {classes} classes; raise the limit")
    ranks = np.empty(len(split), dtype=np.float64)  # any prefix in this order is stratified
    for label in np.unique(split.labels):
        draw = np.random.default_rng([seed, int(label) + 1])
        members = draw.permutation(np.flatnonzero(split.labels == label))
        ranks[members] = (np.arange(len(members)) + 0.5) / len(members)
        ranks[members[0]] = 0
    return SubsetSplit(split, np.sort(np.argsort(ranks, kind="stable")[:limit]))
