"""Images named by a table, and what is said of a table that cannot be used."""

from pathlib import Path

import numpy as np
import pytest

import polymask as pm
from polymask.data.images import limited
from polymask.errors import DataError
from tables import COLOURS, make_classes, make_labels, make_values, paint, write_table


def test_a_table_gives_the_classes_of_a_folder(tmp_path):
    data = pm.load_data(make_classes(tmp_path / "birds"))
    assert (data.name, data.classes, data.target.kind) == ("birds", ("green", "red"), "classes")
    found = {
        Path(split.origin(i)).name: data.classes[split.labels[i]]
        for split in data.splits().values()
        for i in range(len(split))
    }
    assert len(found) == 16
    assert all(name.startswith(label) for name, label in found.items())
    assert "70, 15 and 15 %" in data.notes[0]


def test_a_table_beside_the_images_or_named_itself_is_the_same_domain(tmp_path):
    root = make_classes(tmp_path / "birds")
    beside, itself = pm.load_data(root / "photos"), pm.load_data(str(root / "labels.csv"))
    inside = pm.load_data(root)
    assert beside.train.fingerprint() == itself.train.fingerprint() == inside.train.fingerprint()
    assert (beside.name, itself.name) == ("photos", "birds")


def test_a_column_split_decides_the_parts(tmp_path):
    rows = []
    for number, part in enumerate(["train"] * 4 + ["Validation", "val"] + ["test"] * 2):
        paint(tmp_path / "images" / f"{number}.png", (number % 2, 0, 0), number)
        rows.append([f"{number}.png", "ab"[number % 2], part])
    write_table(tmp_path / "labels.csv", rows, "filename", "class", "split")
    data = pm.load_data(tmp_path)
    assert [len(split) for split in data.splits().values()] == [4, 2, 2]
    assert Path(data.test.origin(0)).name == "6.png"


def test_train_val_and_test_may_be_tables_of_their_own(tmp_path):
    for part, count in (("train", 6), ("val", 2), ("test", 2)):
        for number in range(count):
            paint(tmp_path / part / f"{number}.png", (number % 2, 0, 0), number)
        header, label = ("path", "label"), [["a"], ["b"]]
        rows = [[f"{number}.png", *label[number % 2]] for number in range(count)]
        write_table(tmp_path / f"{part}.csv", rows, *header)
    data = pm.load_data(tmp_path)
    assert [len(split) for split in data.splits().values()] == [6, 2, 2]
    assert Path(data.val.origin(0)).parent.name == "val"
    write_table(tmp_path / "test.csv", [["0.png"], ["1.png"]], "path")
    data = pm.load_data(tmp_path)
    assert data.test is None
    assert any("test.csv has no labels" in note for note in data.notes)


def test_semicolons_make_several_labels_and_so_do_columns_of_zeros_and_ones(tmp_path):
    data = pm.load_data(make_labels(tmp_path / "a"))
    assert (data.target.kind, data.classes) == ("labels", tuple(sorted(COLOURS)))
    assert any("6 images have no label" in note for note in data.notes)
    rows = []
    for number in range(48):
        paint(tmp_path / "b" / f"{number}.png", (0, 0, 0), number)
        rows.append([f"{number}.png", *(number >> channel & 1 for channel in range(3))])
    write_table(tmp_path / "b" / "labels.csv", rows, "path", *COLOURS)
    other = pm.load_data(tmp_path / "b")
    assert (other.target.kind, other.classes) == ("labels", COLOURS)
    order = [COLOURS.index(name) for name in data.classes]
    assert sorted(map(tuple, np.concatenate([s.labels for s in data.splits().values()]))) == sorted(
        map(tuple, np.concatenate([s.labels[:, order] for s in other.splits().values()]))
    )


def test_every_label_has_a_training_image_even_in_a_small_limit(tmp_path):
    data = pm.load_data(make_labels(tmp_path))
    few = limited(data.train, 6, 0, "few")
    assert len(few) == 6
    assert few.labels.any(0).all()


def test_numbers_are_values_only_where_that_is_said(tmp_path):
    root = make_values(tmp_path / "lamps")
    data = pm.load_data(root, target="values")
    assert (data.target.kind, data.classes, data.train.labels.dtype) == ("values", ("brightness",), np.float64)
    assert {int(v) for split in data.splits().values() for v in split.labels[:, 0]} == set(range(1000, 1480, 10))
    spread = [np.ptp(split.labels) for split in data.splits().values()]
    assert min(spread) > 100, "val and test are not from one end of the range"
    with pytest.raises(DataError, match="48 different numbers; give the target values"):
        pm.load_data(root)


def broken(tmp_path: Path, rows, *header: str) -> Path:
    root = make_classes(tmp_path)
    write_table(root / "labels.csv", rows, *header)
    return root


GOOD = [[f"photos/{colour}-{n}.png", colour] for colour in ("red", "green") for n in range(8)]


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        (GOOD, ("where", "what"), "labels.csv has no column for the images' files, only 'where', 'what'"),
        ([[*row, "x"] for row in GOOD], ("path", "kind", "note"), "no column called label, only 'kind', 'note'"),
        ([*GOOD[:-1], [GOOD[-1][0], " "]], ("path", "label"), "lines 17 have an empty label"),
        ([*GOOD, ["photos/none.png", "red"]], ("path", "label"), "names 1 of 17 images that are not there.*none.png"),
        ([*GOOD, GOOD[0]], ("path", "label"), "names red-0.png in lines 2 and 18"),
        ([*GOOD, ["photos/red-1.png"]], ("path", "label"), "lines 18 have no path, or not the 2 cells"),
        ([[*row, "dev"] for row in GOOD], ("path", "label", "split"), "line 2: split 'dev' is not train, val or test"),
        ([], ("path", "label"), "names no image"),
        ([[row[0], "red"] for row in GOOD], ("path", "label"), "only one class"),
        (GOOD, ("path", "path"), "two columns of one name"),
    ],
)
def test_a_table_that_cannot_be_used_says_where_and_why(tmp_path, rows, header, message):
    with pytest.raises(DataError, match=message):
        pm.load_data(broken(tmp_path, rows, *header))


@pytest.mark.parametrize(
    ("cells", "message"),
    [(["1.5"] * 15 + ["two"], "lines 17 have something other than a number"), (["nan"] * 16, "number")],
)
def test_a_value_that_is_not_a_number_is_refused(tmp_path, cells, message):
    rows = [[row[0], cell] for row, cell in zip(GOOD, cells, strict=True)]
    with pytest.raises(DataError, match=message):
        pm.load_data(broken(tmp_path, rows, "path", "age"), target="values")


def test_a_source_of_classes_has_no_labels_or_values():
    with pytest.raises(DataError, match="digits has classes, not values"):
        pm.load_data("digits", target="values")
    with pytest.raises(DataError, match="target 'value' is not known; did you mean values"):
        pm.load_data("digits", target="value")


def test_an_image_that_two_tables_name_is_refused(tmp_path):
    for number in range(8):
        paint(tmp_path / f"{number}.png", (number % 2, 0, 0), number)
    rows = [[f"{number}.png", "ab"[number % 2]] for number in range(8)]
    write_table(tmp_path / "train.csv", rows, "path", "label")
    write_table(tmp_path / "test.csv", rows[:2], "path", "label")
    with pytest.raises(DataError, match=r"test.csv, line 2: 0.png is in train.csv too"):
        pm.load_data(tmp_path)


def test_columns_and_lines_that_a_spreadsheet_leaves_behind_are_passed_over(tmp_path):
    for number in range(16):
        paint(tmp_path / f"{number}.png", (number % 2, 0, 0), number)
    lines = ["path,label,,", *(f"{number}.png,{'ab'[number % 2]},," for number in range(16)), " , ,,"]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    assert pm.load_data(tmp_path).classes == ("a", "b")
