"""The house: rooms import only from rooms above them, and it stays one that can be walked."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rooms_page import CONVENIENCES, HOUSE, ROOMS, imported, imports, modules, room

WITHOUT_TORCH = "errors files pack.format pack.hub train.recipe benchmarks.tables report.pages serve.process cli.parser"


def test_every_module_is_in_a_room():
    assert {room(name) for name in modules()} == set(ROOMS)


def test_rooms_import_only_from_rooms_above_them():
    place = {name: number for number, name in enumerate(ROOMS)}
    wrong = {(a, b) for a, b in imports() if place[room(a)] < place[room(b)]}
    assert wrong == CONVENIENCES


def test_modules_import_each_other_in_one_direction():
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for importer, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            graph[importer] |= {other for other in imported(node) if other != importer}
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in graph[name]:
                walk(other, (*path, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_the_plan_of_the_house_is_its_list_of_folders():
    entries = {path.name for path in HOUSE.iterdir()} - {"__pycache__", "py.typed"}
    assert len(entries) <= 17, sorted(entries)
    sizes = Counter(room(name) for name, path in modules().items() if path.name != "__init__.py")
    assert all(count <= 18 for name, count in sizes.items() if name != "methods"), sizes  # a file a method


@pytest.mark.parametrize(("walk", "files"), [("learn", 50), ("predict", 34)])
def test_what_people_do_most_goes_through_few_files(walk, files, tmp_path):
    command = [sys.executable, Path(__file__).parent / "support" / "walks.py", walk, tmp_path]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    passed = [line for line in done.stdout.splitlines() if line.endswith(".py")]
    assert 10 < len(passed) <= files, passed


@pytest.mark.parametrize("module", WITHOUT_TORCH.split())
def test_what_looks_at_files_and_starts_processes_imports_no_torch(module):
    code = f"import sys, polymask.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
