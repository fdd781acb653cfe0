"""Numbers as a reader wants them, and tables as text in cells, before they are HTML or Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass


def bytes_text(count: float) -> str:
    """12345678 -> "12.3 MB"."""
    return _scaled(count, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), "B")


def bits_text(count: float) -> str:
    """12345678 -> "12.3 Mbit"."""
    return _scaled(count, (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3)), "bit")


def count_text(count: int) -> str:
    """12345678 -> "12.3 million"; below a million, 123456 -> "123,456"."""
    return f"{count / 1e6:.1f} million" if count >= 1_000_000 else f"{count:,}"


def duration_text(seconds: float) -> str:
    """401.2 -> "6 min 41 s"; below ten seconds, 4.21 -> "4.2 s"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def share_text(part: float, whole: float) -> str:
    """The part in percent of the whole, with two digits that matter below ten percent."""
    percent = 100 * part / whole
    return f"{percent:.1f} %" if percent >= 1 else f"{percent:.2g} %"


def moved_text(share: float) -> str:
    """0.473 -> "47.3 %"; few digits where little moved: "0.003 %", and "< 0.001 %" below that."""
    percent = 100 * share
    if percent >= 1:
        return f"{percent:.1f} %"
    if 0 < percent < 0.001:
        return "< 0.001 %"
    return f"{percent:.1g} %" if percent < 0.1 else f"{percent:.2f} %"


def listed(words: Sequence[str]) -> str:
    """["a", "b", "c"] -> "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def difference_text(points: float) -> str:
    """-0.42 -> "0.4 points below"; what rounds to nothing is "level with"."""
    if abs(points) < 0.05:
        return "level with"
    return f"{abs(points):.1f} points {'above' if points > 0 else 'below'}"


def _scaled(count: float, units: tuple[tuple[str, float], ...], smallest: str) -> str:
    for unit, size in units:
        # 999.6 kB would be printed as 1000 kB.
        if count >= 0.9995 * size:
            number = count / size
            return f"{number:.0f} {unit}" if number >= 99.95 else f"{number:#.3g} {unit}"
    return f"{count:.0f} {smallest}"


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
