"""What a domain's images look like to the base: the direction of their mean feature.

    likeness = m / |m|,  m = mean over training images of the base's features

The cosine between an image's own feature and a likeness tells how well the image fits the domain.
It travels in a pack as the note `likeness` of `recipe`: float16 in base64. See docs/serve.md.
"""

import base64
import binascii
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from polymask.core.base import Base
from polymask.data.feed import Feed
from polymask.data.split import Split

NOTE = "likeness"
_IMAGES = 64  # of a domain; half as many do nearly as well
_BATCH = 32
_known: WeakKeyDictionary[Split, dict[str, str | None]] = WeakKeyDictionary()


def likeness_note(base: Base, images: Split) -> dict[str, str]:
    """What a pack's `recipe` says of a domain's training images; nothing where there is nothing.

    Several methods may learn from the same images: it is computed once for them.
    """
    known = _known.setdefault(images, {})
    if base.fingerprint not in known:
        known[base.fingerprint] = likeness(base, images)
    found = known[base.fingerprint]
    return {} if found is None else {NOTE: found}


@torch.no_grad()
def likeness(base: Base, images: Split) -> str | None:
    """The likeness of a domain's training images; None if the base gives no feature vectors."""
    if base.feature_dim is None:
        return None
    feed = Feed(base.input)
    total = torch.zeros(base.feature_dim, device=base.device)
    places = np.linspace(0, len(images) - 1, min(len(images), _IMAGES)).round().astype(int)
    for start in range(0, len(places), _BATCH):
        some = places[start : start + _BATCH]
        crops = [feed.crop(images.image(int(i), feed.shrink.side)) for i in some]
        total += base.run({}, base.placed(feed.batch(crops))).float().sum(0)
    return write_likeness(total)


def write_likeness(feature: Tensor) -> str:
    """A feature's direction, as it stands in a pack."""
    direction = normalize(feature.detach().float().cpu(), dim=0).numpy()
    return base64.b64encode(direction.astype("<f2").tobytes()).decode()


def read_likeness(note: Any, size: int | None) -> Tensor | None:
    """The unit vector (size,) of a note; None where it is not one for a base of this size."""
    if not isinstance(note, str) or size is None:
        return None
    try:
        data = base64.b64decode(note.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        return None
    if len(data) != 2 * size:
        return None
    direction = torch.from_numpy(np.frombuffer(data, "<f2").astype(np.float32))
    if not torch.isfinite(direction).all() or not 0.5 < float(direction.norm()) < 2:
        return None
    return normalize(direction, dim=0)


def fit(features: Tensor, likenesses: Tensor) -> Tensor:
    """Cosines (N, domains) between features (N, size) and likenesses (domains, size)."""
    return normalize(features.float(), dim=1) @ likenesses.T
