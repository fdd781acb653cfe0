"""The decathlon's submission: ids of images and classes, test labels, results.json written and scored.

Domains are counted k = 1 … 10 in the order of their names. Image ids are k·10⁷ + 200000 + n, with n running from 1 over
train, val and test, so the test images of a domain are one run of numbers, in the order of their file names
(000001.jpg …). Category ids are k·10⁷ + c with c from 1 for class c − 1 of polymask.

The test labels are as the organisers published them: labels_test.zip holds ten files side by side, NAME_test.json for
the ten folder names of the challenge (aircraft … vgg-flowers), each in COCO's form:

    {"images": [{"id": 10206668, "file_name": "data/aircraft/test/000001.jpg", …}, …],
     "annotations": [{"image_id": 10206668, "category_id": 10000011, …}, …],
     "categories": [{"id": 10000001, "name": "707-320", …}, …], "info": …, "licenses": …}

Only the annotations are used. A folder around the files does no harm. Nothing is unpacked to disk, and no more is read
than such files can need, even if the archive claims other sizes.

A submission, results.json, is one list with an entry for every test image of all ten domains, in any order:

    [{"image_id": 10206668, "category_id": 10000011}, …]
"""

import json
import operator
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, SupportsIndex

from polymask.benchmarks.records import FACTS
from polymask.benchmarks.score import Score, score
from polymask.benchmarks.suites import DECATHLON
from polymask.errors import BenchmarkError
from polymask.files import write_atomically

_BLOCK = 10_000_000
_FIRST_IMAGE = 200_000
_LARGEST_ARCHIVE = 64 << 20  # bytes; the real one has 1.6 MB
_LARGEST_FILE = 64 << 20  # the largest real one, of ImageNet, has 10 MB
_LARGEST_RESULTS = 256 << 20  # a whole submission has about 8 MB
_MOST_FILES = 1000
# What zipfile raises for damaged archives and for features that it does not know.
_NO_ARCHIVE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, UnicodeDecodeError)

Labels = dict[str, dict[int, int]]  # domain -> image id -> category id
Predictions = Mapping[str, Mapping[str | int, SupportsIndex]]


@dataclass(frozen=True)
class DomainIds:
    """The ids that one domain's images and classes have."""

    domain: str
    k: int
    classes: int
    before: int  # train and val images
    test: int  # test images

    @cached_property
    def images(self) -> range:
        """The ids of the test images."""
        first = self.k * _BLOCK + _FIRST_IMAGE + self.before + 1
        return range(first, first + self.test)

    @cached_property
    def categories(self) -> range:
        """The ids of the classes."""
        first = self.k * _BLOCK + 1
        return range(first, first + self.classes)

    def owns_image(self, image_id: int) -> bool:
        """Whether the number is one that images of this domain may have, in any split."""
        return _FIRST_IMAGE < image_id - self.k * _BLOCK < _BLOCK


def _ids_of(k: int, domain: str) -> DomainIds:
    facts = FACTS["benchmarks"]["decathlon"][domain]
    return DomainIds(domain, k, facts["classes"], facts["train_and_val"], facts["test"])


DOMAIN_IDS = {domain: _ids_of(k, domain) for k, domain in enumerate(sorted(DECATHLON.domains), start=1)}


def name_images(image_ids: list[int]) -> str:
    """The first of some images, with its domain, and how many more there are in which domains."""
    first, *more = [_domain_of(image_id) for image_id in image_ids]
    text = f"image {image_ids[0]} of {first}"
    if not more:
        return text
    where = ", ".join(f"{count} of {domain}" for domain, count in sorted(Counter(more).items()))
    return f"{text}, and {len(more)} more ({where})"


def _domain_of(image_id: int) -> str:
    return next((domain for domain, ids in DOMAIN_IDS.items() if ids.owns_image(image_id)), "no domain")


def read_labels(path: str | Path) -> Labels:
    """The labels of all ten domains, checked against the challenge's ids."""
    path = Path(path)
    try:
        if path.stat().st_size > _LARGEST_ARCHIVE:
            raise BenchmarkError(f"{path} is too large to be labels_test.zip")
        with zipfile.ZipFile(path) as archive:
            members = _members(path, archive)
            return {
                domain: _labels(path, _content(path, archive, members[domain]), ids)
                for domain, ids in DOMAIN_IDS.items()
            }
    except _NO_ARCHIVE as error:
        raise BenchmarkError(f"{path} is not a whole zip archive: {error}") from error
    except OSError as error:
        raise BenchmarkError(f"{path} cannot be read: {error.strerror or error}") from error


def _members(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The file of each domain."""
    if len(archive.infolist()) > _MOST_FILES:
        raise BenchmarkError(f"{path} has too many files to be labels_test.zip")
    found: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        domain = PurePosixPath(member.filename).name.removesuffix("_test.json")
        if domain not in DOMAIN_IDS or not member.filename.endswith("_test.json"):
            continue
        if domain in found:
            raise BenchmarkError(f"{path} has {found[domain].filename} and {member.filename}; keep one")
        found[domain] = member
    lacking = [f"{domain}_test.json" for domain in DOMAIN_IDS if domain not in found]
    if lacking:
        raise BenchmarkError(
            f"{path} lacks {', '.join(lacking)}; give the organisers' labels_test.zip, from srebuffi/residual_adapters"
        )
    return found


def _content(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Any:
    if member.flag_bits & 1:
        raise BenchmarkError(f"{path}: {member.filename} is encrypted; give the plain archive")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BenchmarkError(f"{path}: {member.filename} is not deflated; zip it the usual way")
    with archive.open(member) as file:
        data = file.read(_LARGEST_FILE + 1)
    if len(data) > _LARGEST_FILE:
        raise BenchmarkError(f"{path}: {member.filename} is too large to be test labels")
    return _parsed(data, f"{path}: {member.filename}")


def _parsed(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BenchmarkError(f"{where} is not JSON ({error})") from error


def _labels(path: Path, content: Any, ids: DomainIds) -> dict[int, int]:
    where = f"{path}: {ids.domain}_test.json"
    answers = content.get("annotations") if isinstance(content, dict) else None
    if not isinstance(answers, list) or not answers:
        raise BenchmarkError(f"{where} has no annotations; give the labelled files, not stripped")
    labels = pairs(answers, where)
    foreign = [image for image in labels if not ids.owns_image(image)]
    if foreign:
        raise BenchmarkError(f"{where} has {name_images(foreign)}; copy the archive again")
    for image, category in labels.items():
        if category not in ids.categories:
            told = f"image {image} has category {category}, which {ids.domain} does not have"
            raise BenchmarkError(f"{where}: {told}; copy the archive again")
    return labels


def pairs(entries: list[Any], where: str) -> dict[int, int]:
    """Image id -> category id from COCO's entries; each image once."""
    found: dict[int, int] = {}
    twice: list[int] = []
    for place, entry in enumerate(entries):
        image, category = (entry.get("image_id"), entry.get("category_id")) if isinstance(entry, dict) else (None, None)
        if type(image) is not int or type(category) is not int:
            raise BenchmarkError(
                f'{where}: entry {place} must be {{"image_id": …, "category_id": …}} with two '
                f"integers, and is {str(entry)[:80]}"
            )
        if image in found:
            twice.append(image)
        found[image] = category
    if twice:
        raise BenchmarkError(f"{where} has more than one answer for {name_images(twice)}")
    return found


def score_submission(results: str | Path, labels: Labels) -> Score:
    """Score a results.json against the labels that `read_labels` gives.

    Nothing is scored unless every test image has one answer, in the range of its domain.
    """
    path = Path(results)
    answers = _read(path)
    _compare(path, answers, {image: None for part in labels.values() for image in part})
    expected = {image: DOMAIN_IDS[domain].categories for domain, part in labels.items() for image in part}
    odd = [image for image, categories in expected.items() if answers[image] not in categories]
    if odd:
        categories = expected[odd[0]]
        raise BenchmarkError(
            f"{path} has category {answers[odd[0]]} for {name_images(odd)}; it must be one of {categories[0]} to "
            f"{categories[-1]}"
        )
    accuracy = {
        domain: 100 * sum(answers[image] == label for image, label in part.items()) / len(part)
        for domain, part in labels.items()
    }
    return score(DECATHLON, accuracy)


def write_submission(path: str | Path, predictions: Predictions, *, complete: bool = True) -> None:
    """Write results.json from predicted classes, the whole file or nothing.

    `predictions` has for each domain {test image: class}. A test image is the stem of its file name as a string,
    "000001", or its image id as an integer. A class counts from 0, in the order of category ids.

    The challenge wants every test image of all ten domains. With `complete=False` fewer may be given, or those of a
    copy with other image ids.
    """
    answers: dict[int, int] = {}
    for name, predicted in predictions.items():
        ids = DOMAIN_IDS[DECATHLON.find(name)]
        for image, label in predicted.items():
            image_id = _image_id(ids, image)
            if image_id in answers:
                raise BenchmarkError(f"there are two predictions for {name_images([image_id])}")
            place = operator.index(label)
            if not 0 <= place < ids.classes:
                raise BenchmarkError(
                    f"image {image} of {ids.domain} has class {place}; classes are 0 to {ids.classes - 1}"
                )
            answers[image_id] = ids.categories[place]
    if complete:
        images = {image: None for part in DOMAIN_IDS.values() for image in part.images}
        _compare(Path(path), answers, images)
    entries = [{"image_id": image, "category_id": answers[image]} for image in sorted(answers)]
    write_atomically(Path(path), json.dumps(entries).encode())


def _image_id(ids: DomainIds, image: str | int) -> int:
    if isinstance(image, str):
        number = int(image) if image.isascii() and image.isdigit() and len(image) < 10 else 0
        if not 1 <= number <= ids.test:
            raise BenchmarkError(
                f"{image!r} is not a test image of {ids.domain}; their file names are 000001 to {ids.test:06}, "
                "without .jpg"
            )
        return ids.images[number - 1]
    number = operator.index(image)
    if not ids.owns_image(number):
        raise BenchmarkError(
            f"{number} is not an image id of {ids.domain}; its test images are {ids.images[0]} to {ids.images[-1]}"
        )
    return number


def _compare(path: Path, answers: dict[int, int], images: dict[int, None]) -> None:
    """Exactly these images have an answer."""
    unknown = [image for image in answers if image not in images]
    if unknown:
        raise BenchmarkError(
            f"{path} answers for {name_images(unknown)}, which is not a test image; take image ids from the test "
            "annotations"
        )
    lacking = [image for image in images if image not in answers]
    if lacking:
        raise BenchmarkError(f"{path} has no answer for {name_images(lacking)}; every test image needs one")


def _read(path: Path) -> dict[int, int]:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_RESULTS + 1)
    except OSError as error:
        raise BenchmarkError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _LARGEST_RESULTS:
        raise BenchmarkError(f"{path} is too large to be a results.json")
    content = _parsed(data, str(path))
    if not isinstance(content, list):
        raise BenchmarkError(f"{path} must be one list of answers, not {type(content).__name__}")
    return pairs(content, str(path))
