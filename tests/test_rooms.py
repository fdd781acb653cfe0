"""The house: rooms import only from rooms above them, and it stays one that can be walked."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import polymask as pm

HOUSE = Path(pm.__file__).parent
ROOMS = [
    *("errors", "files", "core", "nets", "methods", "pack", "library"),
    *("data", "train", "conversion", "benchmarks", "report", "serve", "cli"),
]
CONVENIENCES = {("core.domain", "pack.storing")}  # domain.save: what a user expects of a domain
WITHOUT_TORCH = "errors files pack.format pack.hub train.recipe benchmarks.tables report.pages serve.process cli.parser"


@cache
def modules() -> dict[str, Path]:
    """Every module by its name inside the package; a package is its `__init__`."""
    found = {}
    for path in HOUSE.rglob("*.py"):
        name = ".".join(path.relative_to(HOUSE).with_suffix("").parts).removesuffix(".__init__")
        found[name] = path
    return {name: path for name, path in found.items() if name not in ("__init__", "__main__")}


def imported(node: ast.AST) -> set[str]:
    """The modules of ours that an import statement names."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("polymask."):
        home = node.module.removeprefix("polymask.")
        return ({f"{home}.{alias.name}" for alias in node.names} & modules().keys()) or {home}
    if isinstance(node, ast.Import):
        return {a.name.removeprefix("polymask.") for a in node.names if a.name.startswith("polymask.")}
    return set()


def imports() -> set[tuple[str, str]]:
    """(importer, imported), wherever the import stands: lazy ones and those for types too."""
    return {
        (importer, other)
        for importer, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        for other in imported(node)
    }


def room(module: str) -> str:
    return module.split(".")[0]


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
    assert len(modules()) + 2 <= 120


@pytest.mark.parametrize("module", WITHOUT_TORCH.split())
def test_what_looks_at_files_and_starts_processes_imports_no_torch(module):
    code = f"import sys, polymask.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
