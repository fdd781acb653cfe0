"""The Visual Decathlon in its official layout: COCO JSON annotations beside the images.

    ROOT/annotations/NAME_{train,val,test,test_stripped}.json
    ROOT/data/NAME/…                    (file names in the JSON are relative to ROOT)

Classes are numbered by category id, never by folder name: the two orders differ.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import numpy as np

from polymask.data.images import DomainData, Submission
from polymask.data.mirror import may_mirror
from polymask.data.split import FileSplit
from polymask.errors import DataError

Json = dict[str, Any]
STRIPPED = "test_stripped"  # images without labels: of its JSON only the list of them is read


def load_decathlon(place: str, seed: int) -> DomainData:
    """Load `ROOT/NAME`. The official val is kept, so `seed` has no say.

    Test labels come from NAME_test.json where there is one; NAME_test_stripped.json gives test
    images without labels, and then `test` is None and only `submission` has them.
    """
    root, name = Path(place).parent, Path(place).name
    notes = root / "annotations"
    train = _read(notes, name, "train")
    names = {int(entry["id"]): str(entry["name"]) for entry in train["categories"]}
    categories = sorted(names)
    splits = {
        part: _annotated_split(root, _read(notes, name, part), categories, f"{name}_{part}.json")
        for part in ("train", "val")
    }
    labelled = (notes / f"{name}_test.json").is_file()
    test_part = "test" if labelled else STRIPPED
    test_json = _read(notes, name, test_part)
    known = categories if labelled else None
    test = _annotated_split(root, test_json, known, f"{name}_{test_part}.json")
    return DomainData(
        name,
        tuple(names[category] for category in categories),
        splits["train"],
        splits["val"],
        test if labelled else None,
        mirror=may_mirror(name),
        submission=Submission(
            test,
            np.array([entry["id"] for entry in test_json["images"]], dtype=np.int64),
            np.array(categories, dtype=np.int64),
        ),
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
