"""A folder of images: `train/ val/ test/` of class folders, or class folders alone."""

from __future__ import annotations

import difflib
import os
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

from polymask.data.images import DomainData, some
from polymask.data.split import FileSplit, Split
from polymask.data.stratify import complete
from polymask.errors import DataError

SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".dib", ".gif", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".tga"),
}
_VAL_NAMES = ("val", "valid", "validation")
_SYSTEM_FILES = frozenset(("thumbs.db", "desktop.ini", "__macosx"))


@dataclass
class Finds:
    """Images by class, and what else lay in the folders."""

    images: dict[str, list[Path]] = field(default_factory=dict)
    ignored: list[Path] = field(default_factory=list)


def load_folder(root: Path, seed: int) -> DomainData:
    """Load `root/train/CLASS/…` with val and test beside it, or `root/CLASS/…`.

    Parts that are not there are cut from train (`complete`). Class names are sorted; images may lie
    in subfolders of a class, also behind symbolic links.
    """
    parts = _parts(root)
    finds = {part: find_images(folder) for part, folder in parts.items()}
    classes = tuple(sorted(finds["train"].images))
    _check_classes(classes, finds)
    splits = {part: _split(found, classes) for part, found in finds.items()}
    splits, notes = complete(splits, seed, str(root))
    notes += _ignored_note([path for found in finds.values() for path in found.ignored])
    return DomainData(
        root.absolute().name,
        classes,
        splits["train"],
        splits["val"],
        splits.get("test"),
        notes=tuple(notes),
    )


def _parts(root: Path) -> dict[str, Path]:
    """Which folder holds which part; a root of class folders is all train."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; give a folder of class folders")
    if any(root.glob("annotations/*_train.json")):
        raise DataError(f"{root} has the Visual Decathlon's layout; use decathlon:{root}/NAME")
    present = {child.name.lower(): child for child in folders(root)}
    val = next((present[name] for name in _VAL_NAMES if name in present), None)
    test = present.get("test")
    if "train" not in present:
        if val is not None or test is not None:
            raise DataError(
                f"{root} has {(val or test or root).name}/ but no train/; add train/, or rename "
                "that folder if it is a class"
            )
        return {"train": root}
    found = {"train": present["train"], "val": val, "test": test}
    return {part: folder for part, folder in found.items() if folder is not None}


def folders(root: Path) -> list[Path]:
    """The visible folders in `root`, by name."""
    return sorted(child for child in root.iterdir() if child.is_dir() and not _hidden(child))


def find_images(root: Path) -> Finds:
    """The images below each class folder of `root`, in the order of their paths."""
    finds = Finds()
    for child in sorted(root.iterdir()):
        if not child.is_dir():
            finds.ignored += [child] if not _hidden(child) else []
        elif not _hidden(child):
            finds.images[_class_name(child, finds)] = _walk(child, finds.ignored)
    if not finds.images:
        loose = sum(path.suffix.lower() in SUFFIXES for path in finds.ignored)
        raise DataError(
            f"{root} has no class folders ({loose} images lie in it directly); put the images of "
            "each class in a folder of its own"
        )
    empty = [name for name, files in finds.images.items() if not files]
    if empty:
        raise DataError(f"{root}: no image in the folder of {some(empty)}; add images or remove the folder")
    return finds


def _class_name(folder: Path, finds: Finds) -> str:
    """A folder's name, in the one spelling of accents that all systems share."""
    name = unicodedata.normalize("NFC", folder.name)
    if not name.isprintable():
        raise DataError(f"{str(folder)!r} cannot name a class; rename it with printable characters")
    if name in finds.images:
        raise DataError(f"{folder.parent} has two folders {name!r}, spelt differently; merge them")
    return name


def _walk(folder: Path, ignored: list[Path]) -> list[Path]:
    """The images below a folder; a folder that links back to one above it is entered once."""
    files: list[Path] = []
    entered: set[tuple[int, int]] = set()
    for place, below, names in os.walk(folder, followlinks=True):
        status = Path(place).stat()
        if (status.st_dev, status.st_ino) in entered:
            below.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        below[:] = sorted(name for name in below if not _hidden(Path(name)))
        for path in (Path(place, name) for name in sorted(names)):
            if _hidden(path):
                continue
            image = path.suffix.lower() in SUFFIXES and path.is_file()
            (files if image else ignored).append(path)
    return files


def _hidden(path: Path) -> bool:
    return path.name.startswith(".") or path.name.lower() in _SYSTEM_FILES


def _check_classes(classes: tuple[str, ...], finds: dict[str, Finds]) -> None:
    for part, found in finds.items():
        for name in sorted(set(found.images) - set(classes)):
            near = difflib.get_close_matches(name, classes, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise DataError(
                f"class {name!r} is in {part} ({found.images[name][0].parent}) but not in train"
                f"{hint}; rename the folder, or add training images"
            )


def _split(found: Finds, classes: tuple[str, ...]) -> Split:
    number = {name: label for label, name in enumerate(classes)}
    pairs = [(file, number[name]) for name in classes for file in found.images.get(name, ())]
    return FileSplit([file for file, _ in pairs], [label for _, label in pairs])


def _ignored_note(ignored: list[Path]) -> list[str]:
    if not ignored:
        return []
    return [f"ignored {len(ignored)} files that are not images, such as {ignored[0]}"]
