"""torchvision's sets, on small copies in their own formats on disk."""

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polymask.data.load import load_data
from polymask.errors import DataError
from polymask.nets.zoo import import_torchvision

datasets = import_torchvision().datasets
Make = Callable[..., Path]


def write_mnist(root: Path) -> None:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 80), ("t10k", 20)):
        images = np.arange(count, dtype=np.uint8)[:, None, None].repeat(28, 1).repeat(28, 2)
        head = struct.pack(">IIII", 2051, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        labels = (np.arange(count) % 10).astype(np.uint8)
        head = struct.pack(">II", 2049, count)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


def write_cifar10(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        content = {"data": np.full((20, 3072), 7, np.uint8), "labels": [i % 10 for i in range(20)]}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"thing {number}" for number in range(10)]}))


def write_dtd(root: Path) -> None:
    for part in ("train", "val", "test"):
        lines = []
        for name in ("banded", "lacy"):
            for number in range(2):
                path = root / "dtd" / "dtd" / "images" / name / f"{part}_{number}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("CMYK", (30, 20)).save(path)
                lines.append(f"{name}/{path.name}")
        labels = root / "dtd" / "dtd" / "labels" / f"{part}1.txt"
        labels.parent.mkdir(parents=True, exist_ok=True)
        labels.write_text("\n".join(lines) + "\n")


def write_gtsrb(root: Path) -> None:
    base = root / "gtsrb"
    for sign in ("00000", "00001"):
        folder = base / "GTSRB" / "Training" / sign
        folder.mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (20, 20)).save(folder / f"{number}.ppm")
    test = base / "GTSRB" / "Final_Test" / "Images"
    test.mkdir(parents=True)
    rows = ["Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"]
    for number in range(4):
        Image.new("RGB", (20, 20)).save(test / f"{number}.ppm")
        rows.append(f"{number}.ppm;20;20;0;0;20;20;{number % 2}")
    (base / "GT-final_test.csv").write_text("\n".join(rows) + "\n")


def test_mnist_has_its_own_train_and_test_and_is_not_mirrored(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    data = load_data("torchvision:MNIST", root=tmp_path, download=False)
    assert (len(data.train) + len(data.val), len(data.test or ())) == (80, 20)
    assert data.classes[3] == "3 - three"
    assert not data.mirror
    assert data.test is not None
    assert data.test.image(5).getpixel((0, 0)) == (5, 5, 5)
    assert data.test.origin(5) == "MNIST test #5"


def test_cifar10_gives_its_class_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path)
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    data = load_data("torchvision:CIFAR10", root=tmp_path)
    assert data.classes[9] == "thing 9"
    assert (len(data.train) + len(data.val), len(data.test or ())) == (100, 20)
    assert data.mirror
    assert data.train.image(0).size == (32, 32)


def test_dtd_has_three_splits_and_its_files_are_decoded_by_us(tmp_path: Path) -> None:
    write_dtd(tmp_path)
    data = load_data("torchvision:DTD", root=tmp_path)
    assert [len(split) for split in data.splits().values()] == [4, 4, 4]
    assert (data.classes, data.mirror, data.notes) == (("banded", "lacy"), False, ())
    assert data.train.image(0).mode == "RGB"
    broken = tmp_path / "dtd" / "dtd" / "images" / "lacy" / "train_1.jpg"
    broken.write_bytes(b"")
    with pytest.raises(DataError, match=r"lacy.train_1\.jpg: not an image"):
        data.train.image(3)


def test_classes_without_any_image_are_dropped_and_labels_stay_right(tmp_path: Path) -> None:
    write_gtsrb(tmp_path)
    data = load_data("torchvision:GTSRB", root=tmp_path)
    assert data.classes == ("sign 00", "sign 01")
    assert data.test is not None
    assert data.test.labels.tolist() == [0, 1, 0, 1]
    assert "dropped 41 class names" in data.notes[-1]


def test_a_damaged_file_of_a_set_that_decodes_itself_is_named(tmp_path: Path) -> None:
    write_gtsrb(tmp_path)
    (tmp_path / "gtsrb" / "GTSRB" / "Final_Test" / "Images" / "2.ppm").write_bytes(b"no")
    data = load_data("torchvision:GTSRB", root=tmp_path)
    assert data.test is not None
    with pytest.raises(DataError, match="GTSRB test #2: damaged"):
        data.test.image(2)


def test_a_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    write_dtd(tmp_path)
    before = load_data("torchvision:DTD", root=tmp_path)
    prints = {split.fingerprint() for split in before.splits().values()}
    assert len(prints) == 3
    Image.new("RGB", (9, 9)).save(tmp_path / "dtd" / "dtd" / "images" / "lacy" / "train_1.jpg")
    assert before.train.fingerprint() not in prints


def test_an_absent_set_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"torchvision:Food101 is not complete in .*root"):
        load_data("torchvision:Food101", root=tmp_path, download=False)


def test_a_wrong_name_suggests_near_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="try one of Flowers102"):
        load_data("torchvision:Flower102", root=tmp_path)


def test_every_set_of_the_table_exists_and_knows_its_arguments() -> None:
    from inspect import signature

    from polymask.data.libraries import _LAYOUTS

    for name, layout in _LAYOUTS.items():
        known = set(signature(getattr(datasets, name).__init__).parameters)
        for arguments in layout.parts.values():
            assert "kwargs" in known or set(arguments) <= known, name
        assert not layout.downloads or {"download", "kwargs"} & known, name
