"""Write what docs/architecture.md says of the rooms, from the code: their table, and docs/assets/rooms.svg.

python tools/rooms_page.py [--check]
"""

import argparse
import ast
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "src" / "polymask"
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "assets" / "rooms.svg"
TOP = ("errors", "files")  # single modules that every room may import
ROOMS = (  # from the top down: each imports only from those before it
    *TOP,
    *("core", "nets", "methods", "pack", "library", "data"),
    *("train", "lifelong", "conversion", "benchmarks", "report", "serve", "cli"),
)
CONVENIENCES = {  # what a user expects of a thing, though a room further down does it
    ("core.domain", "pack.storing"),  # domain.save
    ("core.input", "data.preprocess"),  # input.transform, built on the one Preprocess
    ("library.model", "train.predict"),  # model.predict, from files to classes
}
_BLOCK = re.compile(r"(<!-- rooms -->\n).*?(<!-- end -->)", re.DOTALL)
WIDTH, BOX, GAP = 720, (150, 46), 34
COLUMN = {  # of four, where no line of the picture runs behind a box
    **{"core": 1.5, "methods": 0, "pack": 1.5, "nets": 3, "library": 1, "data": 3, "train": 2},
    **{"conversion": 0, "lifelong": 0.95, "benchmarks": 3, "report": 3, "serve": 2, "cli": 0.75},
}


def main() -> int:
    """Write the page and the picture, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    wanted = {
        PAGE: _BLOCK.sub(lambda m: f"{m[1]}\n{table()}\n\n{m[2]}", PAGE.read_text()),
        PICTURE: picture(),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if parser.parse_args().check:
        for path in stale:
            print(f"{path.name} is stale; run python tools/rooms_page.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path])
    return 0


@cache
def modules() -> dict[str, Path]:
    """Every module by its name inside the package; a package is its `__init__`."""
    found = {}
    for path in sorted(HOUSE.rglob("*.py")):
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
    """The room that a module is in."""
    return module.split(".")[0]


def table() -> str:
    """A row for each room: what it is for, and its files."""
    rows = ["| room | what is in it | files |", "|---|---|---|"]
    for name in ROOMS:
        home = HOUSE / name
        said = (ast.get_docstring(ast.parse(modules()[name].read_text())) or "").splitlines()[0].rstrip(".")
        inside = sorted(p.stem for p in home.glob("*.py") if p.stem != "__init__") if home.is_dir() else []
        inside += sorted(f"{p.parent.name}/" for p in home.glob("*/__init__.py"))
        rows.append(f"| `{name}{'/' if inside else '.py'}` | {said} | {', '.join(inside)} |")
    return "\n".join(rows)


def needs() -> dict[str, set[str]]:
    """Room -> the rooms that it imports from; `errors` and `files` go without saying."""
    conveniences = {(room(a), room(b)) for a, b in CONVENIENCES}
    pairs = {(room(a), room(b)) for a, b in imports()} - conveniences
    rooms = [name for name in ROOMS if name not in TOP]
    return {name: {b for a, b in pairs if a == name and b in rooms and b != a} for name in rooms}


def picture() -> str:
    """The rooms as boxes, a room below all that it imports; a line is left out where others imply it."""
    above = needs()
    reached: dict[str, set[str]] = {}
    depth: dict[str, int] = {}
    for name in above:
        reached[name] = set().union(above[name], *(reached[other] for other in above[name]))
        depth[name] = 1 + max((depth[other] for other in above[name]), default=-1)
    centre = {
        name: (WIDTH / 4 * (COLUMN[name] + 0.5), level * (BOX[1] + GAP) + BOX[1] / 2 + 10)
        for name, level in depth.items()
    }
    lines, boxes = [], []
    for name, (x, y) in centre.items():
        direct = {o for o in above[name] if not any(o in reached[other] for other in above[name])}
        for other in sorted(direct):
            to_x, to_y = centre[other]
            start, end = y - BOX[1] / 2, to_y + BOX[1] / 2
            bend = (start + end) / 2
            lines.append(f'<path d="M{x:g} {start:g} C{x:g} {bend:g} {to_x:g} {bend:g} {to_x:g} {end:g}"/>')
        files = [path for module, path in modules().items() if room(module) == name]
        boxes.append(
            f'<rect x="{x - BOX[0] / 2:g}" y="{y - BOX[1] / 2:g}" width="{BOX[0]}" height="{BOX[1]}" rx="6"/>'
            f'<text x="{x:g}" y="{y - 2:g}" font-weight="600">{name}/</text>'
            f'<text x="{x:g}" y="{y + 15:g}" font-size="11">{len(files)} files</text>'
        )
    height = (max(depth.values()) + 1) * (BOX[1] + GAP) - GAP + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-label="The rooms of polymask: each imports only from rooms above it" '
        'font-family="system-ui, sans-serif" font-size="14" text-anchor="middle">\n'
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>\n'
        f'<g fill="none" stroke="#64748b" stroke-width="1.5">{"".join(lines)}</g>\n'
        f'<g fill="#ecfdf5" stroke="#0f766e">{"".join(re.findall("<rect[^>]*>", "".join(boxes)))}</g>\n'
        f'<g fill="#0f172a">{"".join(re.findall("<text.*?</text>", "".join(boxes)))}</g>\n</svg>\n'
    )


if __name__ == "__main__":
    sys.exit(main())
