"""Masks and scalars by layer, as numbers."""

from collections.abc import Sequence

from polymask.benchmarks.anatomy import FULL, Anatomy, which_piggyback
from polymask.report.benchmark_results import HERE, number
from polymask.report.sheet import Cell, Column, Line, Sheet


def anatomy_sheet(anatomies: Sequence[Anatomy]) -> Sheet | None:
    """The findings of the parameter analysis, as numbers."""
    if not anatomies:
        return None
    scalars = ("k1", "k2", "k3")
    columns = (
        Column("domain", words=True),
        Column("all weights", "ones, %"),
        Column("first third", "ones, %"),
        Column("last third", "ones, %"),
        *(Column(f"|{k}|", "median over layers") for k in scalars),
        *(Column(k, "magnitude, last ÷ first third") for k in scalars),
        Column("k1, k2 of opposite sign, % of layers"),
    )
    lines = []
    for one in anatomies:
        cells = [Cell(one.domain), number(one.ones, 1)]
        cells += [number(one.early_ones, 1), number(one.late_ones, 1)]
        if one.method == FULL:
            cells += [Cell(f"{one.magnitude(k):.2g}") for k in scalars]
            cells += [number(one.growth(k), 1) for k in scalars]
            cells.append(number(one.opposite, 0))
        else:
            cells += [Cell()] * 7
        lines.append(Line(one.label, tuple(cells)))
    notes = (
        which_piggyback(anatomies),
        "Thirds are of the layers, from input to output; each layer counts once.",
    )
    return Sheet("layers-table", "In numbers", HERE, "method", columns, tuple(lines), notes)
