"""Images in folders: class folders, and the layouts of the two benchmarks.

ImageNet-to-Sketch is laid out as by Piggyback's authors: ROOT/SET/{train,test}/CLASS. Sets with
"cropped" in their name hold pictures cut to the object's box; the benchmark resizes those to the
network's square, and their aspect ratio is lost.

The Visual Decathlon has its official layout, COCO JSON annotations beside the images:

    ROOT/annotations/NAME_{train,val,test,test_stripped}.json
    ROOT/data/NAME/…                    (file names in the JSON are relative to ROOT)

Classes are numbered by category id, never by folder name: the two orders differ.
"""

from __future__ import annotations

import difflib
import json
import os
import unicodedata
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from polymask.data.images import DomainData, Submission, complete, may_mirror, some
from polymask.data.split import FileSplit, Split
from polymask.errors import DataError

SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".dib", ".gif", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".tga"),
}
TABLES = ("labels.csv", "train.csv")  # what tables of images are called
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
    folders_of = _parts(root)
    beside = [child.name for child in folders(root) if folders_of["train"] != root and child not in folders_of.values()]
    remark = f"{root} has a folder train, so {some(beside, 4)} beside it are not classes; if train is one, rename it"
    try:
        finds = {part: find_images(folder) for part, folder in folders_of.items()}
    except DataError as error:
        if not beside:
            raise
        raise DataError(f"{error} ({remark})") from error
    classes = tuple(sorted(finds["train"].images))
    _check_classes(classes, finds)
    splits = {part: _split(found, classes) for part, found in finds.items()}
    parts, notes = complete(splits, seed, str(root))
    ignored = [path for found in finds.values() for path in found.ignored]
    if ignored:
        notes.append(f"ignored {len(ignored)} files that are not images, such as {ignored[0]}")
    if beside:
        notes.append(remark)
    return DomainData(root.absolute().name, classes, *parts, notes=tuple(notes))


def _parts(root: Path) -> dict[str, Path]:
    """Which folder holds which part; a root of class folders is all train."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; give a folder of class folders")
    if any(root.glob("annotations/*_train.json")):
        raise DataError(f"{root} has the Visual Decathlon's layout; use decathlon:{root}/NAME")
    present = {child.name.lower(): child for child in folders(root)}
    names = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
    found = {part: present[name] for part, known in names.items() for name in reversed(known) if name in present}
    if found and "train" not in found:
        lone = next(iter(found.values())).name
        raise DataError(f"{root} has {lone}/ but no train/; add train/, or rename that folder if it is a class")
    return found or {"train": root}


def find_table(root: Path) -> Path | None:
    """The table of a folder: one in it, or beside it where the folder has images but no folders."""
    if root.suffix.lower() == ".csv" and root.is_file():
        return root
    if not root.is_dir():
        return None
    inside = [root / name for name in TABLES if (root / name).is_file()]
    if inside or any(child.is_dir() for child in root.iterdir()):
        return next(iter(inside), None)
    return next((root.absolute().parent / name for name in TABLES if (root.absolute().parent / name).is_file()), None)


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
    pairs = [(file, label) for label, name in enumerate(classes) for file in found.images.get(name, ())]
    return FileSplit([file for file, _ in pairs], [label for _, label in pairs])


def load_sketch(place: str, seed: int) -> DomainData:
    """Load `ROOT/SET`; val is cut from train, as the benchmark has none."""
    root = Path(place)
    names = {child.name for child in folders(root)} if root.is_dir() else set()
    if not {"train", "test"} <= names:
        raise DataError(f"{root} lacks train/ or test/; give sketch:ROOT/SET with both in SET")
    return replace(load_folder(root, seed), squash="cropped" in root.name)


Json = dict[str, Any]
STRIPPED = "test_stripped"  # images without labels: of its JSON only the list of them is read


def load_decathlon(place: str, seed: int) -> DomainData:
    """Load `ROOT/NAME`. The official val is kept, so `seed` does not matter.

    Test labels come from NAME_test.json where there is one; NAME_test_stripped.json gives test
    images without labels, and then `test` is None and only `submission` has them.
    """
    root, name = Path(place).parent, Path(place).name
    notes = root / "annotations"
    train = _read(notes, name, "train")
    names = {int(entry["id"]): str(entry["name"]) for entry in train["categories"]}
    categories = sorted(names)
    labelled = (notes / f"{name}_test.json").is_file()
    test_part = "test" if labelled else STRIPPED
    test_json = _read(notes, name, test_part)
    known = categories if labelled else None
    test = _annotated_split(root, test_json, known, f"{name}_{test_part}.json")
    image_ids = np.array([entry["id"] for entry in test_json["images"]], dtype=np.int64)
    return DomainData(
        name,
        tuple(names[category] for category in categories),
        _annotated_split(root, train, categories, f"{name}_train.json"),
        _annotated_split(root, _read(notes, name, "val"), categories, f"{name}_val.json"),
        test if labelled else None,
        mirror=may_mirror(name),
        submission=Submission(test, image_ids, np.array(categories, dtype=np.int64)),
        notes=() if labelled else ("the test images have no labels here: predict, do not score",),
    )


def _read(annotations: Path, name: str, part: str) -> Json:
    path = annotations / f"{name}_{part}.json"
    needed = {"images"} if part == STRIPPED else {"categories", "images", "annotations"}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        missing = needed - set(content)
    except FileNotFoundError as error:
        there = sorted(file.stem[:-6] for file in annotations.glob("*_train.json"))
        near = difflib.get_close_matches(name, there, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"found here: {', '.join(there) or 'none'}"
        raise DataError(f"{path} is missing; give decathlon:ROOT/NAME ({hint})") from error
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not COCO JSON ({error}); unpack it again") from error
    if missing:
        raise DataError(f"{path} lacks {', '.join(sorted(missing))}; unpack it again")
    return dict(content)


def _annotated_split(root: Path, content: Json, categories: list[int] | None, origin: str) -> FileSplit:
    """The images in the order of the JSON; without `categories` they are unlabelled."""
    files = [root / entry["file_name"] for entry in content["images"]]
    if categories is None:
        return FileSplit(files, [-1] * len(files))
    number = {category: label for label, category in enumerate(categories)}
    answers = {entry["image_id"]: entry["category_id"] for entry in content["annotations"]}
    labels = []
    for entry in content["images"]:
        category = answers.get(entry["id"])
        if category not in number:
            raise DataError(
                f"{origin}: image {entry['id']} ({entry['file_name']}) has category {category}, "
                "which train does not list; unpack the annotations again"
            )
        labels.append(number[category])
    return FileSplit(files, labels)
