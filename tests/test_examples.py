"""Each example runs by the command that its first line names."""

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def command(example: Path) -> str:
    """What the first line says before its colon."""
    first_line = ast.get_docstring(ast.parse(example.read_text())).splitlines()[0]
    return first_line.partition(": ")[0]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_first_line_of_an_example_names_its_command_and_what_it_shows(example):
    line = example.read_text().splitlines()[0]
    words = shlex.split(command(example))
    assert f"examples/{example.name}" in words
    assert line.startswith('"""')
    assert line.partition(": ")[2]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_page_of_examples_names_each_and_its_command(example):
    page = (ROOT / "docs" / "examples.md").read_text()
    assert f"`examples/{example.name}`" in page
    assert f"\n    {command(example)}\n" in page


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_by_its_command_and_keeps_its_promise(example, tmp_path):
    # A folder that has what a fresh clone has after `make install`, and may be written to.
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    words = shlex.split(command(example))
    assert words[0].startswith(".venv/bin/")
    given = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(words, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip(), "an example prints what it shows"
