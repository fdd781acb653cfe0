"""The report of one training, made of the records that it leaves."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from polymask.cli import main
from polymask.errors import DataError
from polymask.report.learn_page import LearnRecord, confusion_matrix, learn_page, read_log, write_learn_report
from polymask.train.evaluation import Answer, Evaluation
from strict_page import Page

NAMES = ("cat", "dog", "<script>alert(1)</script>")


@pytest.fixture
def record(result) -> LearnRecord:
    picture = result.domains[0].predictions[0].image_png
    hardest = (Answer(3, "cat", 0.02, (("dog", 0.97), ("cat", 0.02))),)
    found = Evaluation(NAMES, ((6, 4, 0), (0, 9, 1), (0, 0, 10)), 30, (1, 2, 3, 4, 14), hardest)
    return LearnRecord(
        name="animals",
        method="affine-full",
        base="efficientnet-lite0",
        base_parameters=3_400_000,
        base_bytes=13_700_000,
        images={"train": 90, "test": 30},
        pack_bytes=640_000,
        bits_per_weight=1.39,
        components={"mask": 3_000_000, "head": 40_000},
        command="polymask learn animals --data pictures",
        environment={"torch": "2.13.0"},
        kept_epoch=2,
        value=found.accuracy,
        evaluation=found,
        pictures=(picture,),
    )


def log_of(folder: Path, *accuracies: float | None) -> None:
    begin = {"event": "begin", "epoch": 0, "seed": 7, "data": "pictures", "recipe": {"selection": "best"}}
    lines: list[dict] = [begin]
    for epoch, accuracy in enumerate(accuracies):
        known = {"loss": 2.0 / (epoch + 1), "train_accuracy": 50.0, "val_accuracy": accuracy}
        lines.append({"event": "epoch", "epoch": epoch, "seconds": 1.5} | known)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run(tmp_path, record) -> Path:
    record.write(tmp_path)
    log_of(tmp_path, 60.0, 80.0, 70.0)
    return tmp_path


def test_the_report_says_how_good_it_is_and_how_sure_that_is(run):
    _, path = write_learn_report(run)
    page = Page(path.read_text())
    assert "animals: 83.3 % of 30 test images right" in page.text
    assert "between 66.4 and 92.7 %" in page.text
    assert "One seed".lower() in page.text.lower()
    assert "The pack is what epoch 2 left" in page.text
    assert "4 of 10 images of cat were taken for dog" in page.text
    assert "✗ wrong: it is cat" in page.text
    assert "640 kB" in page.text
    assert "polymask learn animals --data pictures" in page.text


def test_the_report_is_one_file_in_which_names_stay_text(run):
    html = write_learn_report(run)[1].read_text()
    page = Page(html)
    assert page.tags["script"] == page.tags["link"] == 0
    assert all(src.startswith("data:image/") for src in page.values("src"))
    assert NAMES[2] in page.text


def test_a_run_without_held_out_images_has_curves_and_sizes(run, record):
    replace(record, evaluation=None, value=None, pictures=()).write(run)
    log_of(run, None, None)
    page = Page(write_learn_report(run)[1].read_text())
    assert "Accuracy on training images" in page.text
    assert "What it confuses" not in page.text
    assert "What it costs" in page.text


def test_a_domain_that_is_measured_otherwise_is_reported_by_its_own_number(run, record):
    replace(record, evaluation=None, pictures=(), metric="mean error", unit="", value=0.125).write(run)
    log_of(run, 0.9, 0.2)
    page = Page(write_learn_report(run)[1].read_text())
    assert "The mean error is 0.125 on 30 test images" in page.text
    assert "Mean error on validation images" in page.text
    assert "The pack is what epoch 2 left, with 0.2 on validation" in page.text
    assert "validation mean error" in page.text


def test_epochs_that_were_repeated_after_an_interruption_count_once(run):
    with (run / "log.jsonl").open("a") as log:
        log.write(json.dumps({"event": "epoch", "epoch": 2, "loss": 1.0, "val_accuracy": 90.0}) + "\n")
    _, epochs = read_log(run / "log.jsonl")
    assert [entry["epoch"] for entry in epochs] == [0, 1, 2]
    assert epochs[2]["val_accuracy"] == 90.0


def test_what_is_missing_or_damaged_is_named(run, capsys):
    (run / "evaluation.json").write_text("{")
    with pytest.raises(DataError, match=r"evaluation.json is damaged"):
        write_learn_report(run)
    (run / "evaluation.json").unlink()
    assert main(["report", str(run)]) == 1
    assert "its training is not done" in capsys.readouterr().err


def test_the_report_verb_takes_the_folder_of_a_training(run, capsys):
    assert main(["report", str(run), "--out", str(run / "elsewhere")]) == 0
    assert (run / "elsewhere" / "report.html").is_file()
    assert "wrote" in capsys.readouterr().out


def test_making_the_report_imports_no_torch(run):
    code = (
        "import sys; from pathlib import Path; from polymask.report.learn_page import write_learn_report\n"
        f"write_learn_report(Path({str(run)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_matrix_of_many_classes_shows_those_that_are_confused():
    classes = tuple(f"class {i}" for i in range(80))
    counts = [[0] * 80 for _ in classes]
    for place in range(80):
        counts[place][place] = 5
    counts[70][3] = 2
    found = Evaluation(classes, tuple(map(tuple, counts)), 400)
    svg = confusion_matrix(found, name="m")
    text = list(ElementTree.fromstring(svg).itertext())
    assert text.count("class 70") == text.count("class 3") == 2  # a row and a column
    assert len([word for word in text if word.startswith("class ")]) == 60
    assert "2 of 7 class 70 as class 3" in svg


def test_numbers_and_their_units_are_on_one_line(record):
    html = learn_page(record, ({}, []))
    words = re.sub(r"<style.*?</style>|<[^>]*>", "", html, flags=re.DOTALL)
    assert "83.3\u00a0%" in words
    assert "640\u00a0kB" in words
    assert not re.search(r"\d (%|kB|MB)", words)
