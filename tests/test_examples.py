"""Each example runs by the command that its first line names."""

import ast
import json
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


def notebook_cells() -> list[dict]:
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
    assert notebook["nbformat"] == 4
    return notebook["cells"]


def test_the_notebook_has_ten_cells_without_outputs_and_is_on_the_page_of_examples():
    cells = notebook_cells()
    assert len(cells) == 10
    assert not any(cell.get("outputs") for cell in cells)
    assert "`examples/quickstart.ipynb`" in (ROOT / "docs" / "examples.md").read_text()


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_in_order_from_an_empty_folder(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    code = ["".join(cell["source"]) for cell in notebook_cells() if cell["cell_type"] == "code"]
    # Each cell shows the value of its last line, as a notebook does: the reprs run too.
    shown = (
        "import ast, json, sys\n"
        "names = {'__name__': '__main__'}\n"
        "for cell in json.load(sys.stdin):\n"
        "    *before, last = ast.parse(cell).body\n"
        "    exec(compile(ast.Module(before, []), 'cell', 'exec'), names)\n"
        "    kind = 'eval' if isinstance(last, ast.Expr) else 'exec'\n"
        "    tree = ast.Expression(last.value) if kind == 'eval' else ast.Module([last], [])\n"
        "    value = eval(compile(tree, 'cell', kind), names)\n"
        "    picture = getattr(value, '_repr_png_', None)\n"
        "    print(f'{len(picture())} bytes' if picture else repr(value))\n"
    )
    given = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    command = [sys.executable, "-c", shown]
    how = {"cwd": folder, "env": given, "capture_output": True, "text": True, "timeout": 900}
    run = subprocess.run(command, input=json.dumps(code), **how)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "Base(efficientnet-lite0: " in run.stdout
    assert "Learned(affine-full on efficientnet-lite0, 5 classes: 4 epochs, " in run.stdout
    assert "Prediction(images/" in run.stdout
    assert (folder / "library/digits.safetensors").is_file()


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
