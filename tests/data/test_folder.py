import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polymask.data.cache import check
from polymask.data.load import load_data
from polymask.errors import DataError

Make = Callable[..., Path]


def origins(split: object) -> set[str]:
    return {split.origin(index) for index in range(len(split))}  # type: ignore[attr-defined]


def test_train_val_test_folders_are_kept_as_they_are(make_folder: Make) -> None:
    root = make_folder(*(f"{part}/{name}" for part in ("train", "val", "test") for name in "ab"))
    data = load_data(root)
    assert (data.name, data.classes, data.notes) == ("pets", ("a", "b"), ())
    assert {part: len(split) for part, split in data.splits().items()} == {
        "train": 16,
        "val": 16,
        "test": 16,
    }
    assert Path(data.val.origin(9)).relative_to(root) == Path("val/b/001.png")
    assert data.val.labels[9] == 1


def test_without_val_it_is_cut_from_train_and_test_is_untouched(make_folder: Make) -> None:
    data = load_data(make_folder("train/a", "train/b", "test/a", "test/b", count=20))
    assert (len(data.train), len(data.val), len(data.test or ())) == (34, 6, 40)
    assert not origins(data.train) & origins(data.val)
    assert "15 %" in data.notes[0]


def test_train_and_val_without_test_gives_no_test(make_folder: Make) -> None:
    assert load_data(make_folder("train/a", "train/b", "val/a", "val/b")).test is None


def test_class_folders_alone_are_cut_by_the_seed(make_folder: Make) -> None:
    root = make_folder("cat", "dog", count=20)
    one, same, other = load_data(root, seed=1), load_data(str(root), seed=1), load_data(root)
    assert [len(split) for split in one.splits().values()] == [28, 6, 6]
    assert origins(one.train) == origins(same.train) != origins(other.train)


def test_files_that_are_not_images_are_ignored_and_counted(make_folder: Make) -> None:
    root = make_folder("cat", "dog")
    for name in (".DS_Store", "cat/Thumbs.db", "cat/._001.png", "notes.txt", "dog/labels.csv"):
        (root / name).write_text("x")
    (root / ".git" / "objects").mkdir(parents=True)
    data = load_data(root)
    assert data.classes == ("cat", "dog")
    assert sum(map(len, data.splits().values())) == 16
    assert "ignored 2 files" in data.notes[-1]


def test_images_in_subfolders_of_a_class_belong_to_it(make_folder: Make) -> None:
    data = load_data(make_folder("cat/day", "cat/night", "dog"))
    assert data.classes == ("cat", "dog")
    assert np.bincount(data.train.labels).tolist() == [11, 6]


def test_a_link_that_leads_back_is_followed_once(make_folder: Make) -> None:
    root = make_folder("cat", "dog")
    (root / "cat" / "again").symlink_to(root / "cat", target_is_directory=True)
    (root / "dog" / "self").symlink_to("self")
    assert sum(map(len, load_data(root).splits().values())) == 16


def test_suffixes_are_known_in_any_case_and_names_in_any_script(make_folder: Make) -> None:
    root = make_folder("собака", "猫 & co")
    (root / "собака" / "000.png").rename(root / "собака" / "ё.PNG")
    data = load_data(root)
    assert data.classes == ("собака", "猫 & co")
    assert any("ё.PNG" in origin for split in data.splits().values() for origin in origins(split))


def test_one_name_spelt_with_and_without_combining_accents_is_one_class(make_folder: Make) -> None:
    composed, combining = (unicodedata.normalize(form, "né") for form in ("NFC", "NFD"))
    data = load_data(make_folder(f"train/{composed}", "train/b", f"test/{combining}", "test/b"))
    assert data.classes == ("b", composed)
    assert np.bincount(data.test.labels).tolist() == [8, 8]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("folders", "complaint"),
    [
        (["cat"], "only one class"),
        (["train/cat", "train/dog", "test/cat", "test/dgo"], "'dgo' is in test.*mean 'dog'"),
        (["train/cat", "train/dog", "test/Cat", "test/dog"], "'Cat' is in test.*mean 'cat'"),
        (["Cat", "cat"], "differ at most by case"),
        (["test/cat", "test/dog"], "no train/"),
        (["annotations"], "only one class"),
    ],
)
def test_a_layout_that_cannot_be_meant_is_an_error(make_folder: Make, folders: list[str], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        load_data(make_folder(*folders))


def test_an_empty_class_folder_is_named(make_folder: Make) -> None:
    root = make_folder("cat", "dog")
    (root / "emu").mkdir()
    (root / "emu" / "readme.txt").write_text("soon")
    with pytest.raises(DataError, match=r"pets: no image in the folder of 'emu'; add images"):
        load_data(root)


def test_images_without_class_folders_are_an_error_that_counts_them(make_folder: Make) -> None:
    with pytest.raises(DataError, match=r"no class folders \(8 images lie in it directly\)"):
        load_data(make_folder("."))


def test_a_file_or_nothing_in_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_text("x")
    for name in ("x.zip", "nowhere"):
        with pytest.raises(DataError, match=f"{name} is not a folder"):
            load_data(tmp_path / name)


def test_check_names_the_damaged_images_of_all_splits_at_once(make_folder: Make) -> None:
    root = make_folder("cat", "dog", count=40)
    for index in range(15):
        (root / "cat" / f"{index:03}.png").write_bytes(b"" if index % 2 else b"not a picture")
    data = load_data(root)
    with pytest.raises(DataError) as raised:
        check(data)
    lines = str(raised.value).splitlines()
    assert lines[0] == "15 images cannot be used:"
    assert len(lines) == 12
    assert lines[-1].strip() == "and 5 more"
    assert all("cat/0" in line for line in lines[1:11])


def test_check_passes_good_images_and_reports_progress(make_folder: Make) -> None:
    seen: list[tuple[int, int]] = []
    check(load_data(make_folder("cat", "dog")), progress=lambda *state: seen.append(state))
    assert seen == [(count, 16) for count in range(1, 17)]


def test_folders_beside_train_are_named_since_they_may_be_meant_as_classes(make_folder: Make) -> None:
    root = make_folder("train/diesel", "train/steam", "bus", "car")
    assert any("'bus', 'car' beside it are not classes" in note for note in load_data(root).notes)
    with pytest.raises(DataError, match=r"no class folders.*'bus', 'car' beside it are not classes"):
        load_data(make_folder("train", "bus", "car", root="vehicles"))
