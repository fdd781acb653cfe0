"""`polymask score`, run as users run it: as a process."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polymask.benchmarks.published import published_table
from polymask.benchmarks.submission import read_labels

QUIET = (
    "import sys; from polymask.cli import main; code = main(sys.argv[1:]);"
    "assert not {'torch', 'numpy'} & sys.modules.keys(); sys.exit(code)"
)


def polymask(*words: object, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    run = subprocess.run(
        [sys.executable, "-c", QUIET, "score", *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not check or run.returncode == 0, run.stderr
    return run


@pytest.fixture
def room(tmp_path: Path, make_labels: Callable[..., Path]) -> Path:
    """A folder with accuracies of both benchmarks, labels and results."""
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


def test_accuracies_are_scored_without_torch(room: Path) -> None:
    words = ["--benchmark", "decathlon", "--accuracies", "decathlon.json"]
    result = json.loads(polymask(*words, "--json", cwd=room).stdout)
    assert round(result["score"]) == 3495
    assert (round(result["low"], 1), round(result["high"], 1)) == (3457.6, 3532.8)
    assert sum(result["per_domain"].values()) == pytest.approx(result["score"])
    assert "score_per_param" not in result
    text = polymask(*words, cwd=room).stdout
    assert "score 3495.1, 3457.6 to 3532.8 as the accuracies are rounded" in text
    assert "gtsrb" in text


def test_the_number_of_decimals_can_be_said(room: Path) -> None:
    words = ["--benchmark", "decathlon", "--accuracies", "decathlon.json", "--decimals", "3"]
    result = json.loads(polymask(*words, "--json", cwd=room).stdout)
    assert 0 < result["high"] - result["low"] < 1


def test_imagenet_to_sketch_has_its_reference_in_the_file(room: Path) -> None:
    words = ["--benchmark", "imagenet-to-sketch", "--accuracies", "sketch.json"]
    result = json.loads(polymask(*words, "--json", cwd=room).stdout)
    assert round(result["score"]) == 1458
    assert round(result["score_per_param"]) == 1246
    assert (round(result["low"], 1), round(result["high"], 1)) == (1427.7, 1488.6)
    assert "score per parameter 1246.3" in polymask(*words, cwd=room).stdout


def test_a_submission_is_scored_by_the_labels(room: Path) -> None:
    words = ["--benchmark", "decathlon", "--results", "results.json", "--labels"]
    run = polymask(*words, "labels_test.zip", "--json", cwd=room)
    result = json.loads(run.stdout)
    assert result["score"] == result["low"] == result["high"] == 10_000
    assert "has 40 test images, the challenge 139,760" in run.stderr


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
def test_errors_are_one_line(room: Path, words: str, message: str) -> None:
    run = polymask("--benchmark", *words.split(), cwd=room, check=False)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stderr.strip().splitlines()[-1].startswith("polymask: ")


def test_an_unknown_benchmark_makes_no_sense(room: Path) -> None:
    words = ["--benchmark", "marathon", "--accuracies", "decathlon.json"]
    assert polymask(*words, cwd=room, check=False).returncode == 2
