import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polymask.data.load import load_data
from polymask.errors import DataError

CATEGORIES = {50000001: "sign10", 50000002: "sign2", 50000003: "sign1"}
PARTS = {"train": 6, "val": 3, "test": 3}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three classes whose folders sort otherwise than their ids; the JSON is not sorted at all."""
    (tmp_path / "annotations").mkdir()
    first = 50200001
    for part, count in PARTS.items():
        images, answers = [], []
        for number in range(count):
            name = f"data/gtsrb/{part}/{number % 3}/{number:06}.png"
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / name)
            images.append({"id": first + number, "file_name": name})
            answers.append({"image_id": first + number, "category_id": 50000003 - number % 3})
        first += count
        write(tmp_path, part, images, answers[::-1])
        if part == "test":
            write(tmp_path, "test_stripped", images, [])
    return tmp_path


def write(root: Path, part: str, images: list[dict], answers: list[dict]) -> None:
    categories = [{"id": number, "name": name} for number, name in CATEGORIES.items()][::-1]
    content = {"categories": categories, "images": images, "annotations": answers}
    (root / "annotations" / f"gtsrb_{part}.json").write_text(json.dumps(content))


def test_classes_follow_category_ids_and_never_names_or_folders(root: Path) -> None:
    data = load_data(f"decathlon:{root}/gtsrb")
    assert data.classes == ("sign10", "sign2", "sign1")
    assert data.train.labels.tolist() == [2, 1, 0, 2, 1, 0]
    assert data.train.image(4).getpixel((0, 0)) == (4, 0, 0)
    assert data.test is not None
    assert data.test.labels.tolist() == [2, 1, 0]


def test_a_submission_knows_image_and_category_ids(root: Path) -> None:
    submission = load_data(f"decathlon:{root}/gtsrb").submission
    assert submission is not None
    assert submission.image_ids.tolist() == [50200010, 50200011, 50200012]
    assert submission.category_ids.tolist() == sorted(CATEGORIES)


def test_without_test_labels_only_the_submission_has_test_images(root: Path) -> None:
    (root / "annotations" / "gtsrb_test.json").unlink()
    data = load_data(f"decathlon:{root}/gtsrb")
    assert data.test is None
    assert data.submission is not None
    assert data.submission.images.labels.tolist() == [-1, -1, -1]
    assert data.submission.images.image(2).size == (8, 8)
    assert "no labels" in data.notes[0]


def test_the_stripped_test_alone_needs_no_annotations(root: Path) -> None:
    notes = root / "annotations"
    (notes / "gtsrb_test.json").unlink()
    for part in ("test_stripped", "val"):
        path = notes / f"gtsrb_{part}.json"
        content = json.loads(path.read_text())
        del content["annotations"]
        path.write_text(json.dumps(content))
        if part == "test_stripped":
            submission = load_data(f"decathlon:{root}/gtsrb").submission
            assert submission is not None
            assert submission.image_ids.tolist() == [50200010, 50200011, 50200012]
    with pytest.raises(DataError, match=r"gtsrb_val\.json lacks annotations"):
        load_data(f"decathlon:{root}/gtsrb")
    (notes / "gtsrb_test_stripped.json").write_text('{"annotations": []}')
    write(root, "val", [], [])
    with pytest.raises(DataError, match=r"gtsrb_test_stripped\.json lacks images"):
        load_data(f"decathlon:{root}/gtsrb")


def test_signs_digits_characters_and_textures_are_not_mirrored(root: Path) -> None:
    assert not load_data(f"decathlon:{root}/gtsrb").mirror
    assert load_data(f"decathlon:{root}/gtsrb", mirror=True).mirror


def test_a_wrong_name_suggests_the_right_one(root: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'gtsrb'"):
        load_data(f"decathlon:{root}/gtsr")
    with pytest.raises(DataError, match=r"use decathlon:.*/NAME"):
        load_data(root)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not COCO JSON"),
        ("[1]", "lacks annotations, categories, images"),
        ('{"images": []}', "lacks annotations, categories"),
    ],
)
def test_broken_annotations_are_named(root: Path, content: str, complaint: str) -> None:
    (root / "annotations" / "gtsrb_val.json").write_text(content)
    with pytest.raises(DataError, match=rf"gtsrb_val\.json.*{complaint}"):
        load_data(f"decathlon:{root}/gtsrb")


def test_an_image_without_a_label_is_named(root: Path) -> None:
    path = root / "annotations" / "gtsrb_val.json"
    content = json.loads(path.read_text())
    content["annotations"].pop()
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"gtsrb_val\.json: image 50200007 .*category None"):
        load_data(f"decathlon:{root}/gtsrb")


@pytest.mark.parametrize(
    ("name", "classes", "counts", "mirror"),
    [
        ("cifar100", 100, (2000, 500, 600), True),
        ("dtd", 10, (450, 450, 300), False),
        ("gtsrb", 43, (2580, 860, 1290), False),
        ("omniglot", 242, (2662, 968, 1210), False),
        ("vgg-flowers", 102, (1020, 1020, 1020), True),
    ],
)
def test_the_real_domains_load(shared: Path, name: str, classes: int, counts: tuple[int, ...], mirror: bool) -> None:
    data = load_data(f"decathlon:{shared}/decathlon-mini/{name}")
    assert len(data.classes) == classes
    assert tuple(map(len, data.splits().values())) == counts
    assert data.mirror is mirror
    assert data.submission is not None
    assert len(np.unique(data.submission.image_ids)) == counts[2]
    assert min(data.train.image(0).size) == 72
