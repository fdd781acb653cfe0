"""Runs that are kept in a file as soon as they are done, by a key each; several processes may add to one file."""

import argparse
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import polymask as pm
from polymask.files import write_atomically

Run = TypeVar("Run")


def training_options(doc: str, work: str) -> argparse.ArgumentParser:
    """A parser with what all scripts take that train domains of one base."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--base", default="efficientnet-lite0")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--recipe", default="standard")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--side", type=int)
    parser.add_argument("--limit", type=int, help="training images a domain")
    parser.add_argument("--work", type=Path, default=Path(work), help="where packs are kept")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print what was measured before")
    return parser


def domain_options(doc: str, domains: Iterable[str], methods: list[str], limit: int) -> argparse.ArgumentParser:
    """A parser with what scripts take that try methods on domains of sketch-mini and decathlon-mini."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the folder with sketch-mini and decathlon-mini")
    parser.add_argument("--methods", nargs="+", default=methods)
    parser.add_argument("--domains", nargs="+", default=list(domains), choices=list(domains))
    parser.add_argument("--limit", type=int, default=limit, help="training images a domain")
    add_part(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print what was measured before")
    return parser


def add_part(parser: argparse.ArgumentParser) -> None:
    """An option for runs that several processes share."""
    parser.add_argument("--part", default="0/1", help="K/N: every N-th run from the K-th on; each process has its own")


def part_of(runs: list[Any], part: str) -> list[Any]:
    """The runs of one process."""
    place, processes = map(int, part.split("/"))
    return runs[place::processes]


def measure_and_print(
    parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], None], table: Callable[[list[Any]], str]
) -> None:
    """Make the runs that are not there yet, unless only their table is asked for; then print the table."""
    options = parser.parse_args()
    if not options.table:
        measure(options)
    print(table(list(read(options.out).values())))


def missing(runs: Mapping[str, Run], options: argparse.Namespace) -> Iterator[tuple[str, Run]]:
    """The runs of this process that are not in the file when their turn comes, with the keys that they will have."""
    for key in part_of(list(runs), options.part):
        if key not in read(options.out):
            yield key, runs[key]


def recipe_of(options: argparse.Namespace) -> pm.Recipe:
    """The recipe, with the fields that the options change; all is measured at the size that it was learned at.

    Val is not learned from: scripts measure on it, or choose by it, after training. Few images have no more epochs than
    many.
    """
    given = {"epochs": options.epochs, "side": options.side}
    changes = {name: value for name, value in given.items() if value is not None}
    return pm.get_recipe(options.recipe, **changes, test_side=None, refit_on_val=None, least_steps=None)


def read(path: Path) -> dict[str, Any]:
    """All runs that are done."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, more: dict[str, Any]) -> None:
    """Add some, beside what other processes have added meanwhile."""
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        write_atomically(path, (json.dumps(read(path) | more, indent=1) + "\n").encode())
    finally:
        os.close(folder)


def mean(values: Iterable[float | None], digits: int = 1) -> str:
    """The mean of those that are there, as text."""
    there = [value for value in values if value is not None]
    return f"{fmean(there):.{digits}f}" if there else "–"
