"""The page that compares polymask with PEFT says what its result file says."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "compare_peft.py"
RESULTS, PAGE = ROOT / "results" / "compare-peft.json", ROOT / "docs" / "comparison.md"


def compare(*words):
    # -S: without site-packages, so neither torch nor PEFT can be needed
    command = [sys.executable, "-S", SCRIPT, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_tables_of_the_page_are_those_of_the_result_file():
    run = compare("--table", RESULTS, "--page", PAGE, "--check")
    assert run.returncode == 0, run.stderr


def test_a_page_with_another_number_is_found_and_put_right(tmp_path):
    page = tmp_path / "page.md"
    measured = json.loads(RESULTS.read_text())["sizes"][0]["affine-full"]
    right = f"{measured / 1e6:.2f} MB"
    page.write_text(PAGE.read_text().replace(right, "9.99 MB"))
    found = compare("--table", RESULTS, "--page", page, "--check")
    assert found.returncode == 1
    assert "is not what the results say" in found.stderr
    assert compare("--table", RESULTS, "--page", page).returncode == 0
    assert page.read_text() == PAGE.read_text()


def test_the_result_file_answers_every_question_of_the_comparison():
    results = json.loads(RESULTS.read_text())
    assert list(results["setup"]["domains"]) == ["digits", "letters", "solar-cells"]
    for system in results["systems"].values():
        assert system.keys() >= {
            "first_domain_difference_after_two_more",
            "base_difference",
            "mixed_batch",
            "head_widths",
            "file_bytes",
        }
    ours = results["systems"]["polymask affine-full"]
    assert ours["first_domain_difference_after_two_more"] == ours["base_difference"] == 0
    assert ours["mixed_batch"]["works"]
    assert ours["head_widths"] == results["setup"]["domains"]
    timed = [row["ratios"] for row in results["step_time"]["settings"]]
    assert all(ratios.keys() > results["systems"].keys() for ratios in timed)
