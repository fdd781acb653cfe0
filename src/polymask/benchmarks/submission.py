"""The decathlon's submission, results.json: written from a benchmark's packs, and scored offline.

The decathlon's submission, results.json: written, and scored offline.

It is one list with an entry for every test image of all ten domains, in any order:

    [{"image_id": 10206668, "category_id": 10000011}, …]
"""

import json
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsIndex

from polymask.benchmarks.labels import NUMBERINGS, Labels, Numbering, name_images, pairs
from polymask.benchmarks.score import Score, score
from polymask.benchmarks.suites import DECATHLON
from polymask.errors import BenchmarkError
from polymask.files import write_atomically

# What zipfile raises for damaged archives and for features that it does not know.


_LARGEST = 256 << 20  # bytes; a whole submission has about 8 MB

Predictions = Mapping[str, Mapping[str | int, SupportsIndex]]


def score_submission(results: str | Path, labels: Labels) -> Score:
    """Score a results.json against the labels that `read_labels` gives.

    Nothing is scored unless every test image has one answer, in the range of its domain.
    """
    path = Path(results)
    answers = _read(path)
    _compare(path, answers, {image: None for part in labels.values() for image in part})
    _check_categories(path, answers, labels)
    accuracy = {
        domain: 100 * sum(answers[image] == label for image, label in part.items()) / len(part)
        for domain, part in labels.items()
    }
    return score(DECATHLON, accuracy)


def write_submission(path: str | Path, predictions: Predictions, *, complete: bool = True) -> None:
    """Write results.json from predicted classes, the whole file or nothing.

    `predictions` has for each domain {test image: class}. A test image is the stem of its file name
    as a string, "000001", or its image id as an integer. A class counts from 0, in the order of
    category ids, as `decathlon:` data has it.

    The challenge wants every test image of all ten domains. With `complete=False` fewer may be
    given, or those of a copy with other image ids.
    """
    answers: dict[int, int] = {}
    for name, predicted in predictions.items():
        numbering = NUMBERINGS[DECATHLON.find(name)]
        for image, label in predicted.items():
            image_id = _image_id(numbering, image)
            if image_id in answers:
                raise BenchmarkError(f"there are two predictions for {name_images([image_id])}")
            answers[image_id] = _category(numbering, image, operator.index(label))
    if complete:
        images = {image: None for part in NUMBERINGS.values() for image in part.images}
        _compare(Path(path), answers, images)
    entries = [{"image_id": image, "category_id": answers[image]} for image in sorted(answers)]
    write_atomically(Path(path), json.dumps(entries).encode())


def _image_id(numbering: Numbering, image: str | int) -> int:
    if isinstance(image, str):
        number = int(image) if image.isascii() and image.isdigit() and len(image) < 10 else 0
        if not 1 <= number <= numbering.test:
            raise BenchmarkError(
                f"{image!r} is no test image of {numbering.domain}; their file names are 000001 to "
                f"{numbering.test:06}, without .jpg"
            )
        return numbering.images[number - 1]
    number = operator.index(image)
    if not numbering.owns_image(number):
        raise BenchmarkError(
            f"{number} is no image id of {numbering.domain}; its test images are "
            f"{numbering.images[0]} to {numbering.images[-1]}"
        )
    return number


def _category(numbering: Numbering, image: str | int, label: int) -> int:
    if not 0 <= label < numbering.classes:
        raise BenchmarkError(
            f"image {image} of {numbering.domain} has class {label}; classes are 0 to {numbering.classes - 1}"
        )
    return numbering.categories[label]


def _check_categories(path: Path, answers: dict[int, int], labels: Labels) -> None:
    odd = [
        image
        for domain, part in labels.items()
        for image in part
        if answers[image] not in NUMBERINGS[domain].categories
    ]
    if odd:
        categories = next(n.categories for n in NUMBERINGS.values() if n.owns_image(odd[0]))
        raise BenchmarkError(
            f"{path} has category {answers[odd[0]]} for {name_images(odd)}; it must be one of "
            f"{categories[0]} to {categories[-1]}"
        )


def _compare(path: Path, answers: dict[int, int], images: dict[int, None]) -> None:
    """Exactly these images have an answer."""
    unknown = [image for image in answers if image not in images]
    if unknown:
        raise BenchmarkError(
            f"{path} answers for {name_images(unknown)}, which is no test image; take image ids "
            "from the test annotations"
        )
    lacking = [image for image in images if image not in answers]
    if lacking:
        raise BenchmarkError(f"{path} has no answer for {name_images(lacking)}; every test image needs one")


def _read(path: Path) -> dict[int, int]:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise BenchmarkError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _LARGEST:
        raise BenchmarkError(f"{path} is too large to be a results.json")
    try:
        content: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BenchmarkError(f"{path} is not JSON ({error})") from error
    if not isinstance(content, list):
        raise BenchmarkError(f"{path} must be one list of answers, not {type(content).__name__}")
    return pairs(content, str(path))
