"""`polymask score`, as users call it, once as a process of its own."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polymask.benchmarks.published import published_table
from polymask.benchmarks.submission import read_labels
from polymask.cli import main

Scored = Callable[[str], tuple[str, str]]

QUIET = (
    "import sys; from polymask.cli import main; code = main(sys.argv[1:]);"
    "assert not {'torch', 'numpy'} & sys.modules.keys(); sys.exit(code)"
)


@pytest.fixture
def room(tmp_path: Path, make_labels: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """We stand in a folder with accuracies of both benchmarks, labels and results."""
    monkeypatch.chdir(tmp_path)
    decathlon = published_table("decathlon").rows["affine_full"].accuracy
    (tmp_path / "decathlon.json").write_text(json.dumps(decathlon))
    table = published_table("resnet50")
    sketch = {
        "accuracy": table.rows["affine_full"].accuracy,
        "reference": table.reference,
        "params": 1.17,
    }
    (tmp_path / "sketch.json").write_text(json.dumps(sketch))
    labels = read_labels(make_labels())
    answers = [
        {"image_id": image, "category_id": category} for part in labels.values() for image, category in part.items()
    ]
    (tmp_path / "results.json").write_text(json.dumps(answers))
    (tmp_path / "few.json").write_text(json.dumps(answers[3:]))
    return tmp_path


@pytest.fixture
def scored(room: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], tuple[str, str]]:
    """Calls the verb in that room; what it writes to standard output and to standard error."""

    def call(words: str) -> tuple[str, str]:
        assert main(["score", *words.split()]) == 0
        return capsys.readouterr()

    return call


def test_accuracies_are_scored_without_torch(room: Path) -> None:
    words = ["score", "--benchmark", "decathlon", "--accuracies", "decathlon.json", "--json"]
    run = subprocess.run([sys.executable, "-c", QUIET, *words], capture_output=True, text=True, check=True, timeout=300)
    result = json.loads(run.stdout)
    assert round(result["score"]) == 3495
    assert (round(result["low"], 1), round(result["high"], 1)) == (3457.6, 3532.8)
    assert sum(result["per_domain"].values()) == pytest.approx(result["score"])
    assert "score_per_param" not in result


def test_a_person_sees_the_score_its_interval_and_every_domain(scored: Scored) -> None:
    text, _ = scored("--benchmark decathlon --accuracies decathlon.json")
    assert all(number in text for number in ("3495.1", "3457.6", "3532.8"))
    assert all(domain in text for domain in published_table("decathlon").rows["affine_full"].accuracy)


def test_the_number_of_decimals_can_be_said(scored: Scored) -> None:
    result = json.loads(scored("--benchmark decathlon --accuracies decathlon.json --decimals 3 --json")[0])
    assert 0 < result["high"] - result["low"] < 1


def test_imagenet_to_sketch_has_its_reference_in_the_file(scored: Scored) -> None:
    words = "--benchmark imagenet-to-sketch --accuracies sketch.json"
    result = json.loads(scored(f"{words} --json")[0])
    assert round(result["score"]) == 1458
    assert round(result["score_per_param"]) == 1246
    assert (round(result["low"], 1), round(result["high"], 1)) == (1427.7, 1488.6)
    assert "1246.3" in scored(words)[0]


def test_a_submission_is_scored_by_the_labels(scored: Scored) -> None:
    out, err = scored("--benchmark decathlon --results results.json --labels labels_test.zip --json")
    result = json.loads(out)
    assert result["score"] == result["low"] == result["high"] == 10_000
    assert "40 test images" in err
    assert "139,760" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("decathlon", "give --accuracies FILE.json, or --results FILE.json and --labels"),
        ("decathlon --accuracies a --results b", "give --accuracies FILE.json, or"),
        ("decathlon --accuracies none.json", "none.json cannot be read"),
        ("decathlon --accuracies sketch.json", "not a domain of decathlon"),
        ("decathlon --accuracies decathlon.json --labels x", "--labels goes with --results"),
        ("imagenet-to-sketch --accuracies decathlon.json", "is not a domain of imagenet-to-sketch"),
        ("imagenet-to-sketch --results r --labels l", "imagenet-to-sketch has no submissions"),
        ("decathlon --results results.json", "give --labels labels_test.zip"),
        ("decathlon --results r --labels l --decimals 1", "--decimals goes with --accuracies"),
        (
            "decathlon --results few.json --labels labels_test.zip",
            "has no answer for image 10209997 of aircraft, and 2 more (2 of aircraft)",
        ),
    ],
)
def test_errors_are_one_line(room: Path, capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert main(["score", "--benchmark", *words.split()]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.strip().splitlines()[-1].startswith("polymask: ")


def test_an_unknown_benchmark_makes_no_sense(room: Path) -> None:
    assert main(["score", "--benchmark", "marathon", "--accuracies", "decathlon.json"]) == 2
