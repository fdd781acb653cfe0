"""The decathlon's results.json, written and scored offline."""

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polymask.benchmarks import submission as labels_module
from polymask.benchmarks.submission import DOMAIN_IDS, read_labels, score_submission, write_submission
from polymask.errors import BenchmarkError

MakeLabels = Callable[..., Path]


def answers(labels: dict[str, dict[int, int]]) -> list[dict[str, int]]:
    return [
        {"image_id": image, "category_id": category} for part in labels.values() for image, category in part.items()
    ]


def write(folder: Path, content: object) -> Path:
    path = folder / "results.json"
    path.write_text(json.dumps(content))
    return path


def test_the_true_labels_score_10000_in_any_order(make_labels: MakeLabels, tmp_path: Path) -> None:
    labels = read_labels(make_labels())
    result = score_submission(write(tmp_path, answers(labels)[::-1]), labels)
    assert result.score == result.low == result.high == 10_000
    assert set(result.accuracy.values()) == {100.0}


def test_answers_that_are_all_wrong_score_0(make_labels: MakeLabels, tmp_path: Path) -> None:
    labels = read_labels(make_labels())
    wrong = answers(labels)
    for entry in wrong:
        entry["category_id"] += 1 if entry["category_id"] % 2 else -1
    result = score_submission(write(tmp_path, wrong), labels)
    assert result.score == 0
    assert set(result.accuracy.values()) == {0.0}


def test_one_wrong_answer_of_four_is_75_percent(make_labels: MakeLabels, tmp_path: Path) -> None:
    labels = read_labels(make_labels())
    given = answers(labels)
    given[0]["category_id"] += 1
    result = score_submission(write(tmp_path, given), labels)
    assert result.accuracy["aircraft"] == 75
    assert result.accuracy["dtd"] == 100


def test_labels_may_lie_in_a_folder_beside_other_files(make_labels: MakeLabels) -> None:
    path = make_labels(folder="labels/")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("__MACOSX/labels/._dtd_test.json", b"\0")
        archive.writestr("README", "hello")
    assert read_labels(path).keys() == DOMAIN_IDS.keys()


def test_what_is_wrong_with_results_is_named(make_labels: MakeLabels, tmp_path: Path) -> None:
    labels = read_labels(make_labels())
    right = answers(labels)

    def refuse(content: object, message: str) -> None:
        with pytest.raises(BenchmarkError, match=message):
            score_submission(write(tmp_path, content), labels)

    first = right[0]["image_id"]
    refuse(right[1:], f"has no answer for image {first} of aircraft; every test image needs one")
    refuse(
        right[5:],
        rf"image {first} of aircraft, and 4 more \(3 of aircraft, 1 of cifar100\); every",
    )
    refuse([*right, right[-1]], "more than one answer for image 100208189 of vgg-flowers")
    refuse([*right, *right[:4]], rf"image {first} of aircraft, and 3 more \(3 of aircraft\)")
    unknown = {"image_id": 40200001, "category_id": 40000001}
    refuse([*right, unknown], "answers for image 40200001 of dtd, which is not a test image")
    refuse([*right, unknown | {"image_id": 7}], "answers for image 7 of no domain")
    foreign = [{**right[0], "category_id": 20000001}, *right[1:]]
    refuse(
        foreign,
        f"category 20000001 for image {first} of aircraft; it must be one of 10000001 to 10000100",
    )
    too_high = [entry | {"category_id": entry["category_id"] + 5000} for entry in right]
    refuse(too_high, r"category 10005001 .*and 39 more \(3 of aircraft, 4 of cifar100")
    refuse({"results": right}, "must be one list of answers, not dict")
    refuse([*right, {"image_id": "1", "category_id": 2}], "entry 40 must be .* two integers")
    refuse([*right, 5], "entry 40 must be")
    refuse([*right, {"image_id": 1.0, "category_id": 2}], "entry 40 must be")
    refuse([*right, {"image_id": True, "category_id": 2}], "entry 40 must be")


def test_results_that_cannot_be_read_are_named(make_labels: MakeLabels, tmp_path: Path) -> None:
    labels = read_labels(make_labels())
    with pytest.raises(BenchmarkError, match=r"none\.json cannot be read: No such file"):
        score_submission(tmp_path / "none.json", labels)
    path = tmp_path / "results.json"
    for text in (b"[{", b"\xff\xfe\xff", b"[" * 100_000):
        path.write_bytes(text)
        with pytest.raises(BenchmarkError, match=r"results\.json is not JSON"):
            score_submission(path, labels)


def test_what_is_wrong_with_labels_is_named(make_labels: MakeLabels, tmp_path: Path) -> None:
    def refuse(message: str, **changes: object) -> None:
        with pytest.raises(BenchmarkError, match=message):
            read_labels(make_labels(**changes))

    refuse(r"lacks dtd_test\.json, vgg-flowers_test\.json; give", dtd=None, vgg_flowers=None)
    refuse(r"dtd_test\.json has no annotations; .* not stripped", dtd={"annotations": []})
    refuse("dtd_test.json has no annotations", dtd=[])
    one = {"image_id": 40203761, "category_id": 40000001}
    refuse("more than one answer for image 40203761 of dtd", dtd={"annotations": [one, one]})
    wrong = {"annotations": [one | {"category_id": 40000048}]}
    refuse("image 40203761 has category 40000048, which dtd does not have", dtd=wrong)
    refuse("has image 7 of no domain", dtd={"annotations": [one | {"image_id": 7}]})
    with pytest.raises(BenchmarkError, match=r"none\.zip cannot be read"):
        read_labels(tmp_path / "none.zip")
    with pytest.raises(BenchmarkError, match="cannot be read"):
        read_labels(tmp_path)


def test_a_domain_twice_in_the_archive_is_refused(make_labels: MakeLabels) -> None:
    path = make_labels()
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../../dtd_test.json", "{}")
    with pytest.raises(BenchmarkError, match=r"has dtd_test\.json and \.\./\.\./dtd_test\.json"):
        read_labels(path)


def test_archives_that_are_not_what_they_should_be_are_refused(make_labels: MakeLabels, tmp_path: Path) -> None:
    path = make_labels()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BenchmarkError, match="is not a whole zip archive"):
        read_labels(path)
    damaged = bytearray(whole)
    damaged[100:200] = bytes(100)
    path.write_bytes(damaged)
    with pytest.raises(BenchmarkError, match="is not a whole zip archive"):
        read_labels(path)
    at = whole.index(b"PK\x01\x02")  # the first entry of the directory; its flags are 8 bytes on
    encrypted = bytearray(whole)
    struct.pack_into("<H", encrypted, at + 8, 1)
    path.write_bytes(encrypted)
    with pytest.raises(BenchmarkError, match=r"aircraft_test\.json is encrypted"):
        read_labels(path)
    odd = bytearray(whole)
    struct.pack_into("<H", odd, at + 10, 14)  # LZMA
    path.write_bytes(odd)
    with pytest.raises(BenchmarkError, match=r"aircraft_test\.json is not deflated"):
        read_labels(path)
    path.write_bytes(b"hello")
    with pytest.raises(BenchmarkError, match="is not a whole zip archive"):
        read_labels(path)


def test_no_damaged_byte_leads_to_another_error(make_labels: MakeLabels) -> None:
    path = make_labels()
    whole = path.read_bytes()
    messages = []
    for place in range(0, len(whole), 4):
        data = bytearray(whole)
        data[place] ^= (0x01, 0x40, 0xA5)[place % 3]
        path.write_bytes(data)
        try:
            read_labels(path)
        except BenchmarkError as error:
            messages.append(str(error))
    assert len(messages) > 100  # not all: some bytes, as those of dates, do no harm
    assert all(message.startswith(str(path)) for message in messages)


def test_an_archive_that_swells_is_not_read_to_its_end(
    make_labels: MakeLabels, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_labels(dtd={"annotations": [], "padding": " " * 100_000})
    monkeypatch.setattr(labels_module, "_LARGEST_FILE", 50_000)
    with pytest.raises(BenchmarkError, match=r"dtd_test\.json is too large"):
        read_labels(path)
    monkeypatch.setattr(labels_module, "_MOST_FILES", 9)
    with pytest.raises(BenchmarkError, match="too many files"):
        read_labels(path)
    monkeypatch.setattr(labels_module, "_LARGEST_ARCHIVE", 100)
    with pytest.raises(BenchmarkError, match="too large to be labels_test"):
        read_labels(path)


def test_stems_and_image_ids_name_the_same_images(tmp_path: Path) -> None:
    by_stem, by_id = tmp_path / "stem.json", tmp_path / "id.json"
    write_submission(by_stem, {"aircraft": {"000002": 99, "000001": 0}}, complete=False)
    classes = {np.int64(10206669): np.int64(99), 10206668: 0}
    write_submission(by_id, {"Airc.": classes}, complete=False)
    assert by_stem.read_bytes() == by_id.read_bytes()
    assert json.loads(by_stem.read_text()) == [
        {"image_id": 10206668, "category_id": 10000001},
        {"image_id": 10206669, "category_id": 10000100},
    ]


@pytest.mark.parametrize(
    ("predictions", "message"),
    [
        ({"aircrft": {}}, "'aircrft' is not a domain of decathlon; did you mean aircraft"),
        ({"dtd": {"001881": 0}}, "'001881' is not a test image of dtd; .* 000001 to 001880"),
        ({"dtd": {"000001.jpg": 0}}, "without .jpg"),
        ({"dtd": {"000000": 0}}, "'000000' is not a test image of dtd"),
        ({"dtd": {10206668: 0}}, "10206668 is not an image id of dtd; .* 40203761 to 40205640"),
        ({"dtd": {"000001": 47}}, "image 000001 of dtd has class 47; classes are 0 to 46"),
        ({"dtd": {"000001": -1}}, "has class -1"),
        ({"dtd": {"000001": 0, 40203761: 0}}, "two predictions for image 40203761 of dtd"),
    ],
)
def test_odd_predictions_are_refused(tmp_path: Path, predictions: dict, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        write_submission(tmp_path / "results.json", predictions, complete=False)
    assert not list(tmp_path.iterdir())


def test_a_submission_that_lacks_images_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("before")
    with pytest.raises(BenchmarkError, match=r"no answer for image 10206669 .*139758 more"):
        write_submission(path, {"aircraft": {"000001": 0}})
    with pytest.raises(BenchmarkError, match="image 10206667 of aircraft, which is not a test image"):
        write_submission(path, {"aircraft": {10206667: 0}})
    assert path.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_a_whole_submission_has_139760_answers(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    predictions = {
        name: {f"{stem:06}": 0 for stem in range(1, numbers.test + 1)} for name, numbers in DOMAIN_IDS.items()
    }
    write_submission(path, predictions)
    assert len(json.loads(path.read_text())) == 139_760


def test_the_numbering_is_that_of_the_published_labels(shared: Path, tmp_path: Path) -> None:
    labels = read_labels(shared / "data" / "decathlon-labels" / "labels_test.zip")
    for name, numbers in DOMAIN_IDS.items():
        assert list(labels[name]) == list(numbers.images)
        assert set(labels[name].values()) == set(numbers.categories)
    predictions = {
        name: {
            f"{stem:06}": category - DOMAIN_IDS[name].categories[0]
            for stem, category in enumerate(part.values(), start=1)
        }
        for name, part in labels.items()
    }
    path = tmp_path / "results.json"
    write_submission(path, predictions)
    assert score_submission(path, labels).score == 10_000
