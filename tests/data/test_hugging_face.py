"""Hugging Face datasets, on small local copies in their own formats."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polymask.data.cache import check
from polymask.data.load import load_data
from polymask.errors import DataError

datasets = pytest.importorskip("datasets", reason="needs the package datasets")


def table(count: int = 20, label: Any = None, labels: list | None = None, name: str = "kind") -> Any:
    features = {
        "photo": datasets.Image(),
        "place": datasets.Value("string"),
        name: label or datasets.ClassLabel(names=["unused", "cat", "dog"]),
    }
    content = {
        "photo": [Image.new("RGBA", (9, 6), (0, number, 0, 255)) for number in range(count)],
        "place": ["home"] * count,
        name: labels or [1 + number % 2 for number in range(count)],
    }
    return datasets.Dataset.from_dict(content, features=datasets.Features(features))


def test_a_saved_dataset_with_three_splits_loads(tmp_path: Path) -> None:
    parts = {"train": table(20), "validation": table(6), "test": table(4)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "pets")
    data = load_data(f"hf:{tmp_path}/pets")
    assert (data.name, data.classes) == ("pets", ("cat", "dog"))
    assert [len(split) for split in data.splits().values()] == [20, 6, 4]
    assert data.train.labels[:4].tolist() == [0, 1, 0, 1]
    assert data.train.image(7).getpixel((0, 0)) == (0, 7, 0)
    assert "dropped 1 class names" in data.notes[-1]
    assert data.train.fingerprint() == load_data(f"hf:{tmp_path}/pets").train.fingerprint()
    check(data)


def test_a_single_saved_table_is_cut(tmp_path: Path) -> None:
    table(40).save_to_disk(tmp_path / "pets")
    data = load_data(f"hf:{tmp_path}/pets")
    assert [len(split) for split in data.splits().values()] == [28, 6, 6]


def test_a_parquet_file_loads(tmp_path: Path) -> None:
    table(40).to_parquet(tmp_path / "pets.parquet")
    data = load_data(f"hf:{tmp_path}/pets.parquet", root=tmp_path / "downloads")
    assert (data.name, data.classes) == ("pets", ("cat", "dog"))
    assert data.train.image(0).size == (9, 6)


def test_test_labels_that_are_secret_give_no_test(tmp_path: Path) -> None:
    parts = {"train": table(20), "validation": table(6), "test": table(4, labels=[-1] * 4)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "pets")
    assert load_data(f"hf:{tmp_path}/pets").test is None


def test_labels_may_be_words_in_a_column_called_label(tmp_path: Path) -> None:
    words = ["owl", "emu"] * 20
    table(40, datasets.Value("string"), words, "label").save_to_disk(tmp_path / "birds")
    data = load_data(f"hf:{tmp_path}/birds")
    assert data.classes == ("emu", "owl")
    assert data.train.labels[:2].tolist() == [1, 0]


def test_a_table_without_labels_or_images_is_an_error(tmp_path: Path) -> None:
    table().remove_columns("kind").save_to_disk(tmp_path / "a")
    table().remove_columns("photo").save_to_disk(tmp_path / "b")
    with pytest.raises(DataError, match="has no ClassLabel column"):
        load_data(f"hf:{tmp_path}/a")
    with pytest.raises(DataError, match="has no Image column"):
        load_data(f"hf:{tmp_path}/b")


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be loaded"):
        load_data(f"hf:{tmp_path}/nowhere", download=False)


def test_images_without_a_label_are_refused_and_not_called_the_first_class(tmp_path: Path) -> None:
    table(10, labels=[0, 1] * 4 + [-1] * 2).save_to_disk(tmp_path / "pets")
    with pytest.raises(DataError, match="2 of 10 train images have no label; leave them out"):
        load_data(f"hf:{tmp_path}/pets")
