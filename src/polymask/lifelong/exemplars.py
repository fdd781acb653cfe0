"""A few images of a domain's classes, kept in its library for the time when it grows.

They are chosen so that the mean of their features stays near the class's (herding, arXiv 1611.07725), and stored as
squares of the size that the domain's images are made smaller to: bytes (N, side, side, 3) in NAME.exemplars beside the
pack. Nothing is kept unless it is asked for.
"""

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.data.images import DomainData
from polymask.data.loader import loader_at
from polymask.data.preprocess import Preprocess
from polymask.data.split import ArraySplit, Labels, Shrink, Split, SubsetSplit
from polymask.errors import DataError, FileError, PackError
from polymask.files import exemplars_path, json_object, write_atomically
from polymask.train.unknown import observe

_KEY = "polymask-exemplars"  # of the metadata of safetensors
_LOOKED_AT = 100  # images of a class, from which some are chosen
_MOST = 1000  # of a class
Kept = tuple[NDArray[np.uint8], Labels]


def choose_exemplars(base: Base, domain: Domain, data: DomainData, each: int) -> Kept:
    """Images (N, side, side, 3) and their labels: `each` of every class of `data`."""
    check_each(each, data)
    labels = data.train.labels
    looked_at = np.concatenate([np.flatnonzero(labels == c)[:_LOOKED_AT] for c in range(len(data.classes))])
    subset = SubsetSplit(data.train, looked_at)
    features = observe(base, domain, loader_at(subset, domain.input)).features
    chosen: list[int] = []
    for label in range(len(data.classes)):
        mine = np.flatnonzero(subset.labels == label)
        chosen += [int(mine[place]) for place in herded(features[torch.from_numpy(mine)], each)]
    shrink = Preprocess(domain.input).shrink
    pieces = [_square(shrink(subset.image(i, shrink.side)), shrink) for i in chosen]
    return np.stack(pieces), subset.labels[chosen]


def _square(pixels: NDArray[np.uint8], shrink: Shrink) -> NDArray[np.uint8]:
    """The middle of an image, or all of one that is squashed; small ones are enlarged, so that all are of one size."""
    from PIL import Image

    if not shrink.squash:
        side = min(pixels.shape[:2])
        top, left = ((length - side) // 2 for length in pixels.shape[:2])
        pixels = pixels[top : top + side, left : left + side]
    size = shrink.side, shrink.side
    return pixels if pixels.shape[:2] == size else np.asarray(Image.fromarray(pixels).resize(size))


def check_each(each: int, data: DomainData) -> None:
    """Raise unless so many images of each class can be kept."""
    if not 1 <= each <= _MOST:
        raise DataError(f"keep_exemplars={each} must be from 1 to {_MOST} images a class")
    if data.target.kind != "classes":
        raise DataError(f"{data.name} has {data.target.kind}; exemplars are for classes")


def herded(features: Tensor, count: int) -> list[int]:
    """Places of images of which the mean feature, of every first few, is as near as can be to that of all."""
    features = torch.nn.functional.normalize(features.double(), dim=1)
    mean, total = features.mean(0), torch.zeros(features.shape[1], dtype=torch.float64)
    left, found = list(range(len(features))), list[int]()
    while left and len(found) < count:
        distances = ((total + features[left]) / (len(found) + 1) - mean).square().sum(1)
        best = left.pop(int(distances.argmin()))
        total += features[best]
        found.append(best)
    return found


def write_exemplars(pack: Path, domain: Domain, images: NDArray[np.uint8], labels: Labels) -> int:
    """Write a domain's exemplars beside its pack; how many bytes they take."""
    from safetensors.numpy import save

    notes = {"fingerprint": domain.fingerprint, "classes": domain.classes}
    data = save({"images": np.ascontiguousarray(images), "labels": labels.astype(np.int64)}, {_KEY: json.dumps(notes)})
    try:
        write_atomically(exemplars_path(pack), data)
    except FileError as error:
        raise PackError(str(error)) from error
    return len(data)


def read_exemplars(pack: Path, domain: Domain) -> Split | None:
    """What is kept of a domain's images; None where nothing is, an error where it is not this domain's."""
    from safetensors import SafetensorError, safe_open

    path = exemplars_path(pack)
    if not path.exists():
        return None
    try:
        with safe_open(path, "numpy") as file:
            notes = json_object(path, (file.metadata() or {}).get(_KEY, ""), "note", PackError)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise PackError(f"{path} is damaged: {error}; remove it, or copy it again") from error
    images, labels = (tensors.get(name, np.zeros(0)) for name in ("images", "labels"))
    classes = domain.classes or []
    good = tensors.keys() == {"images", "labels"} and images.dtype == np.uint8 and images.ndim == 4
    good = good and images.shape[1] == images.shape[2] > 0 and images.shape[3] == 3
    good = good and labels.dtype == np.int64 and labels.shape == images.shape[:1] and len(labels) > 0
    known = notes.get("classes")
    if not good or not isinstance(known, list) or labels.min() < 0 or labels.max() >= len(known):
        raise PackError(f"{path} does not hold images of a domain; remove it, or copy it again")
    if notes.get("fingerprint") != domain.fingerprint or known[: len(classes)] != classes:
        raise PackError(f"{path} is of another domain; remove it to extend without images")
    mine = labels < len(classes)  # it may have more, of a version that was rolled back
    return ArraySplit(path.name, images[mine], labels[mine])


def with_exemplars_of(pack: Path, base: Base, domain: Domain, old: Split, data: DomainData) -> int:
    """Keep images of the new classes of an extended domain beside its old ones, as many of each; the bytes of all."""
    first = len(domain.classes or []) - len(data.classes)
    each = int(np.bincount(old.labels).max())
    images, labels = choose_exemplars(base, domain, data, each)
    shrink = Preprocess(domain.input).shrink
    earlier = np.stack([_square(np.asarray(old.image(place)), shrink) for place in range(len(old))])
    return write_exemplars(
        pack, domain, np.concatenate([earlier, images]), np.concatenate([old.labels, labels + first])
    )
