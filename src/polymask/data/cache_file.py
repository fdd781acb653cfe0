"""The file of a cache: pixels one image after another, then their sizes.

pixels of image 0, image 1, …    uint8, (H, W, 3) each
sizes                            int64 (N, 2), H and W
N                                int64
b"polymask"                      8 bytes: the file is whole
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from polymask.data.shrink import Pixels

_MAGIC = b"polymask"
_FOOT = 8 + len(_MAGIC)


def write_pixels(path: Path, images: Iterable[Pixels]) -> None:
    """Write images as they come; none is held."""
    sizes = []
    with path.open("wb") as file:
        for image in images:
            file.write(np.ascontiguousarray(image).data)
            sizes.append(image.shape[:2])
        file.write(np.array(sizes, dtype="<i8").tobytes())
        file.write(len(sizes).to_bytes(8, "little") + _MAGIC)


def open_pixels(path: Path) -> list[Pixels] | None:
    """Map a file's images into memory; None where there is no whole file."""
    if not path.is_file() or (end := path.stat().st_size) < _FOOT:
        return None
    # Copy on write, because torch warns of arrays that it may not write.
    content = np.asarray(np.memmap(path, dtype=np.uint8, mode="c"))
    foot = content[-_FOOT:].tobytes()
    count = int.from_bytes(foot[:8], "little")
    start = end - _FOOT - 16 * count
    if foot[8:] != _MAGIC or start < 0:
        return None
    sizes = np.frombuffer(content[start : end - _FOOT].tobytes(), dtype="<i8").reshape(count, 2)
    ends = np.cumsum(3 * sizes.prod(axis=1))
    if count and ends[-1] != start:
        return None
    return [
        content[stop - 3 * height * width : stop].reshape(height, width, 3)
        for stop, (height, width) in zip(ends.tolist(), sizes.tolist(), strict=True)
    ]
