"""Images named by a table: `labels.csv`, or `train.csv` with val.csv and test.csv, in a folder of images or beside it.

    path,label,split          one class for each image; `split` (train, val or test) may be left out
    path,label                several labels for each image, as in cat;dog
    path,cat,dog              the same, with a 0 or 1 in the column of each label
    path,age                  with the target "values": every column is a number to learn

A file is looked for beside the table, in the folder that was given, and in the folders `images` and those named like
its split. All problems of a table that are alike are named in one error, by their lines.
"""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polymask.core.target import CLASSES, Target, get_target
from polymask.data.folders import TABLES
from polymask.data.images import DomainData, complete, some
from polymask.data.split import FileSplit, Labels, Split
from polymask.errors import DataError

PARTS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path")
_LABELS = ("label", "labels", "class", "category", "value", "target")
_SEPARATOR = ";"  # between the labels of an image
_TRUTH = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}


@dataclass(frozen=True)
class Row:
    """One image: the table and line that name it, its file, its cells by column, and its split where that is said."""

    table: Path
    line: int
    file: Path
    cells: dict[str, str]
    part: str | None


def load_table(table: Path, root: Path, seed: int, target: str | Target | None = None) -> DomainData:
    """Load the images that a table names; `root` is the folder that was given, or the table itself.

    Without a target it is several labels where a cell has a semicolon or columns have only 0 and 1, else classes.
    """
    tables: dict[str, Path] = {}
    notes: list[str] = []
    if table.name.lower() == "train.csv":
        there = {part: [table.with_name(f"{name}.csv") for name in names] for part, names in PARTS.items()}
        tables = {part: file for part, files in there.items() for file in files if file.is_file()}
    rows, columns = _read(table, root, "train" if len(tables) > 1 else None)
    wanted, names = _choose(table, rows, columns, target)
    for part, file in tables.items():
        if file == table:
            continue
        more, theirs = _read(file, root, part)
        if missing := sorted(set(names) - set(theirs)):
            if part != "test":
                raise DataError(f"{file} has no column {some(missing)}, which {table.name} has; add it")
            notes.append(f"{file.name} has no labels ({some(missing)}), so it is not used")
            continue
        rows += more
        _check_repeated(rows)
    truth, classes = _truth(table, rows, names, wanted)
    _check_files(table, rows)
    parts, more_notes = complete(_splits(table, rows, truth), seed, str(table))
    ignored = [name for name in columns if name not in names]
    if ignored:
        notes.append(f"columns of {table.name} that are not used: {', '.join(ignored)}")
    if wanted.kind == "labels" and (bare := int((truth.sum(1) == 0).sum())):
        notes.append(f"{bare} images have no label")
    folder = root if root.is_dir() else table.parent
    name = folder.absolute().name if table.name.lower() in TABLES else table.stem
    return DomainData(name, classes, *parts, notes=(*more_notes, *notes), target=wanted)


def _read(table: Path, root: Path, part: str | None) -> tuple[list[Row], list[str]]:
    """The rows of a table, and its columns other than path and split."""
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",\t;", key=head.count), strict=True)
            lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if "".join(cells).strip()]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} cannot be read as CSV in UTF-8 ({error}); save it again") from error
    width = max((at for at, name in enumerate(lines[0][1], 1) if name), default=0) if lines else 0
    if not any("".join(cells[width:]) for _, cells in lines):  # empty columns that a spreadsheet leaves behind
        lines = [(number, cells[:width]) for number, cells in lines]
    header = [name.lower() for name in lines[0][1]] if lines else []
    place = next((header.index(name) for name in _PATHS if name in header), None)
    if place is None:
        raise DataError(
            f"{table} has no column for the images' files, only {some(header)}; its first line must name one path. "
            "If it is not about the images, rename it"
        )
    if len(lines) < 2:
        raise DataError(f"{table} names no image; add lines, or remove it")
    names = lines[0][1]
    if len(set(header)) < len(header):
        raise DataError(f"{table} has two columns of one name among {some(header)}; rename one")
    split = header.index("split") if "split" in header else None
    columns = [name for at, name in enumerate(names) if at not in (place, split) and name]
    rows, odd = [], []
    for number, cells in lines[1:]:
        if len(cells) != len(names) or not cells[place]:
            odd.append(number)
            continue
        mine = part or (None if split is None else _part(table, number, cells[split]))
        found = {name: cell for name, cell in zip(names, cells, strict=True) if name in columns}
        rows.append(Row(table, number, _file(table, root, cells[place], mine), found, mine))
    _refuse(
        [(table, number) for number in odd],
        f"have no path, or not the {len(names)} cells that the first line has",
        "mend them",
    )
    _check_repeated(rows)
    return rows, columns


def _part(table: Path, line: int, cell: str) -> str:
    for part, known in PARTS.items():
        if cell.lower() in known:
            return part
    raise DataError(f"{table}, line {line}: split {cell!r} is not train, val or test; change it")


def _file(table: Path, root: Path, path: str, part: str | None) -> Path:
    """Where an image lies; beside the table if it is nowhere."""
    folder = table.parent
    places = [folder, root, folder / "images", *(folder / name for name in PARTS.get(part or "", ()))]
    return next((file for place in places if (file := place / path).is_file()), folder / path)


def _check_repeated(rows: Sequence[Row]) -> None:
    seen: dict[Path, Row] = {}
    for row in rows:
        first = seen.setdefault(row.file, row)
        if first is row:
            continue
        if first.table != row.table:
            raise DataError(
                f"{row.table}, line {row.line}: {row.file.name} is in {first.table.name} too (line {first.line}); "
                "an image is for training or for testing, so remove one of them"
            )
        raise DataError(
            f"{row.table} names {row.file.name} in lines {first.line} and {row.line}; name it once, with several "
            f"labels as a{_SEPARATOR}b"
        )


def _check_files(table: Path, rows: Sequence[Row]) -> None:
    missing = [str(row.file) for row in rows if not row.file.is_file()]
    if missing:
        raise DataError(
            f"{table} names {len(missing)} of {len(rows)} images that are not there: {some(missing, 3)}; put them "
            "there, or write their paths as seen from the table"
        )


def _refuse(places: Sequence[tuple[Path, int]], problem: str, remedy: str) -> None:
    """Raise where there are such lines, and name those of the first table that has some."""
    if places:
        table = places[0][0]
        lines = [line for one, line in places if one == table]
        more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise DataError(f"{table}: lines {', '.join(map(str, lines[:5]))}{more} {problem}; {remedy}")


def _choose(
    table: Path, rows: Sequence[Row], columns: list[str], target: str | Target | None
) -> tuple[Target, list[str]]:
    """What the table's labels are, and the columns that have them."""
    named = columns if len(columns) == 1 else [name for name in columns if name.lower() in _LABELS][:1]
    if target is not None:
        wanted = get_target(target)
        if columns and (named or wanted.kind != "classes"):
            return wanted, named or columns
    cells = [row.cells[named[0]] for row in rows] if named else []
    if any(_SEPARATOR in cell for cell in cells):
        return get_target("labels"), named
    if named:
        if target is None and (hint := _numbers(cells)):
            raise DataError(f"{table}: {hint}; give the target values to learn numbers, or classes")
        return CLASSES, named
    if len(columns) > 1 and all(row.cells[name].lower() in _TRUTH for row in rows for name in columns):
        return get_target("labels"), columns
    raise DataError(
        f"{table} has no column called label, only {some(columns)}; rename the one with the classes, give a 0 or 1 for "
        "each label, or give the target values if they are numbers to learn"
    )


def _numbers(cells: Sequence[str]) -> str:
    """Why cells look like numbers to learn, if they do: hardly any of them occurs twice."""
    try:
        found = {float(cell) for cell in cells}
    except ValueError:
        return ""
    return "" if 2 * len(found) < len(cells) else f"its labels are {len(found)} different numbers"


def _truth(table: Path, rows: Sequence[Row], columns: list[str], target: Target) -> tuple[Labels, tuple[str, ...]]:
    """The labels of all rows, and their names."""
    return {"classes": _classes, "labels": _labels, "values": _values}[target.kind](table, rows, columns)


def _classes(table: Path, rows: Sequence[Row], columns: list[str]) -> tuple[Labels, tuple[str, ...]]:
    found = [_spelt(row.cells[columns[0]]) for row in rows]
    empty = [(row.table, row.line) for row, name in zip(rows, found, strict=True) if not name]
    _refuse(empty, f"have an empty {columns[0]}", "give a class, or remove them")
    names = sorted(set(found))
    number = {name: place for place, name in enumerate(names)}
    return np.array([number[name] for name in found], dtype=np.int64), tuple(names)


def _labels(table: Path, rows: Sequence[Row], columns: list[str]) -> tuple[Labels, tuple[str, ...]]:
    if len(columns) > 1:
        bad = [(row.table, row.line) for row in rows if not all(row.cells[c].lower() in _TRUTH for c in columns)]
        _refuse(bad, "have something other than 0 or 1 in the columns of labels", "change them")
        return np.array([[_TRUTH[row.cells[name].lower()] for name in columns] for row in rows]), tuple(columns)
    found = [{_spelt(part) for part in row.cells[columns[0]].split(_SEPARATOR)} - {""} for row in rows]
    names = sorted(set().union(*found))
    if not names:
        raise DataError(f"{table}: {columns[0]} is empty in every line; give labels, as in a{_SEPARATOR}b")
    return np.array([[int(name in mine) for name in names] for mine in found]), tuple(names)


def _values(table: Path, rows: Sequence[Row], columns: list[str]) -> tuple[Labels, tuple[str, ...]]:
    found = np.array([[_number(row.cells[name]) for name in columns] for row in rows], dtype=np.float64)
    bad = [(row.table, row.line) for row, values in zip(rows, found, strict=True) if not np.isfinite(values).all()]
    _refuse(bad, f"have something other than a number in {some(columns, 3)}", "give numbers, or remove them")
    return found, tuple(columns)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def _spelt(name: str) -> str:
    """A name, in the one spelling of accents that all systems share."""
    return unicodedata.normalize("NFC", name.strip())


def _splits(table: Path, rows: Sequence[Row], truth: Labels) -> dict[str, Split]:
    """The images of each split that the table names; all are train where it names none."""
    found: dict[str, Split] = {}
    for part in PARTS:
        mine = [at for at, row in enumerate(rows) if (row.part or "train") == part]
        if mine:
            found[part] = FileSplit([rows[at].file for at in mine], truth[mine])
    if "train" not in found:
        raise DataError(f"{table} has no image whose split is train; add some")
    return found
