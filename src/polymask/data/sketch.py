"""The ImageNet-to-Sketch benchmark as Piggyback's authors laid it out: ROOT/SET/{train,test}/CLASS.

Sets with "cropped" in their name hold pictures cut to the object's box; the benchmark resizes those
to the network's square without keeping their aspect ratio.
"""

from dataclasses import replace
from pathlib import Path

from polymask.data.folder import folders, load_folder
from polymask.data.images import DomainData
from polymask.errors import DataError


def load_sketch(place: str, seed: int) -> DomainData:
    """Load `ROOT/SET`; val is cut from train, as the benchmark has none."""
    root = Path(place)
    names = {child.name for child in folders(root)} if root.is_dir() else set()
    if not {"train", "test"} <= names:
        raise DataError(f"{root} lacks train/ or test/; give sketch:ROOT/SET with both in SET")
    return replace(load_folder(root, seed), squash="cropped" in root.name)
