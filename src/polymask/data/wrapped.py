"""Datasets of other libraries as a domain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polymask.data.images import DomainData
from polymask.data.mirror import may_mirror
from polymask.data.split import Labels, Split, WrappedSplit
from polymask.data.stratify import complete


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
