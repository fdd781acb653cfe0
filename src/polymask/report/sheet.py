"""Tables as text in cells, before they are HTML or Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

NOTHING = "–"
_MANY = 9


@dataclass(frozen=True)
class Cell:
    """What stands in a cell, and after it in small type what qualifies it."""

    text: str = NOTHING
    after: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Column:
    """A column's heading; neighbours with the same `group` stand under one more."""

    title: str
    group: str = ""
    words: bool = False  # to the left, and may wrap
    strong: bool = False


@dataclass(frozen=True)
class Line:
    """A row: its name, below it in small type how to ask for it, and what one must know of it."""

    head: str
    cells: tuple[Cell, ...]
    detail: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Sheet:
    """A table with its title; `origin` says whose numbers these are."""

    name: str  # its id on a page
    title: str
    origin: str  # "measured here", "published", or ""
    stub: str  # heading of the rows' names
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The headings over several columns, and over how many; none where no column has one."""
        spans: list[tuple[str, int]] = []
        for column in self.columns:
            if spans and spans[-1][0] == column.group:
                spans[-1] = (column.group, spans[-1][1] + 1)
            else:
                spans.append((column.group, 1))
        return spans if any(column.group for column in self.columns) else []

    @property
    def many(self) -> bool:
        """Whether there are so many columns that deviations go below their means."""
        return len(self.columns) > _MANY

    def style(self, index: int, strong: bool) -> str:
        """The classes of a cell in the column with this index; `first` is beside a group."""
        column = self.columns[index]
        before = self.columns[index - 1].group if index else ""
        classes = {"words": column.words, "kept": strong, "first": before != column.group}
        return " ".join(name for name, holds in classes.items() if holds)


def markdown(sheet: Sheet) -> str:
    """The sheet as a heading, a pipe table and its notes."""
    title = f"{sheet.title} ({sheet.origin})" if sheet.origin else sheet.title
    groups = {column.group for column in sheet.columns if column.group}
    if len(groups) == 1:  # said once, over the table
        title = f"{title}: {groups.pop()}"
    headings = [sheet.stub, *(_heading(column, bool(groups)) for column in sheet.columns)]
    rules = ["---", *("---" if column.words else "---:" for column in sheet.columns)]
    lines = [[_head(line), *map(_cell, line.cells)] for line in sheet.lines]
    table = "\n".join(_pipes(row) for row in (headings, rules, *lines))
    return "\n\n".join([f"### {escaped(title)}", table, *(escaped(note) for note in sheet.notes)])


def escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    text = one_line(text)
    for letter in "\\`*_<>[]|":
        text = text.replace(letter, f"\\{letter}")
    return text


def one_line(text: str) -> str:
    """Text without line breaks and letters that cannot be printed."""
    return "".join(c if c.isprintable() else " " for c in text)


def _heading(column: Column, with_group: bool) -> str:
    text = f"{column.group}: {column.title}" if column.group and with_group else column.title
    return f"**{escaped(text)}**" if column.strong else escaped(text)


def _head(line: Line) -> str:
    head = escaped(line.head)
    if line.detail and line.detail != line.head:
        head += f" ({escaped(line.detail)})"
    return f"{head}: *{escaped(line.remark)}*" if line.remark else head


def _cell(cell: Cell) -> str:
    text = escaped(f"{cell.text} {cell.after}".strip())
    return f"**{text}**" if cell.strong else text


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
