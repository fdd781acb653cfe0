"""What pages are made of: numbers as a reader wants them, tables as text in cells, and templates."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

NOTHING = "–"
_NO_TEXT = re.compile(r"(<style.*?</style>|<pre.*?</pre>|<[^>]*>)", re.DOTALL)
_UNITS = r"%|(?:[kMG]?B|[kMG]?bits?|ms|s|min|px|points?|million)\b"
_BEFORE_UNIT = re.compile(rf"(?<=\d) (?={_UNITS}|± ?\d)|(?<=±) (?=\d)|(?<=\d\u00a0min) (?=\d)|(?<=\d min) (?=\d)")
_MANY = 9


@dataclass(frozen=True)
class Colour:
    """A role and its two values; `light` is also what figures are drawn with."""

    role: str
    light: str
    dark: str


PAPER = Colour("paper", "#fdfdfc", "#15171a")
PANEL = Colour("panel", "#f4f4f1", "#1f2226")
INK = Colour("ink", "#1c1d1f", "#e9e8e4")
MUTED = Colour("muted", "#5f6368", "#a3a7ad")
LINE = Colour("line", "#dcdcd8", "#363a40")
ALARM = Colour("alarm", "#b3121d", "#ff8a80")
SERIES = (
    Colour("series-0", "#0067a5", "#5cb8f0"),  # blue
    Colour("series-1", "#b84d00", "#f5954a"),  # vermilion
    Colour("series-2", "#007a59", "#35c79b"),  # bluish green
    Colour("series-3", "#a03f76", "#e298c2"),  # reddish purple
    Colour("series-4", "#8a6400", "#e8b53a"),  # orange
    Colour("series-5", "#3d6f8e", "#9cc7e0"),  # sky blue
    Colour("series-6", "#6b6b1e", "#d8d160"),  # yellow
)
COLOURS = (PAPER, PANEL, INK, MUTED, LINE, ALARM, *SERIES)


def variables(theme: str) -> str:
    """CSS declarations of every role, for the theme "light" or "dark"."""
    return " ".join(f"--{colour.role}: {getattr(colour, theme)};" for colour in COLOURS)


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


@dataclass(frozen=True)
class Cell:
    """What stands in a cell, and after it in small type what qualifies it."""

    text: str = NOTHING
    after: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Heading:
    """What stands over a column; neighbours with the same `group` have one more over them."""

    title: str
    group: str = ""
    words: bool = False  # to the left, and may wrap
    strong: bool = False


@dataclass(frozen=True)
class PageRow:
    """A row: its name, below it in small type how to ask for it, and what one must know of it."""

    name: str
    cells: Sequence[Cell]
    detail: str = ""
    remark: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table with its title; `origin` says whose numbers these are."""

    name: str  # its id on a page
    title: str
    origin: str  # "measured here", "published", or ""
    stub: str  # over the rows' names
    headings: Sequence[Heading]
    rows: Sequence[PageRow]
    notes: Sequence[str] = ()

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The headings over several columns, and over how many; none where no column has one."""
        spans = [(group, len(list(found))) for group, found in groupby(heading.group for heading in self.headings)]
        return spans if any(group for group, _ in spans) else []

    @property
    def many(self) -> bool:
        """Whether there are so many columns that deviations go below their means."""
        return len(self.headings) > _MANY

    def style(self, index: int, strong: bool) -> str:
        """The classes of a cell in the column with this index; `first` is beside a group."""
        heading = self.headings[index]
        before = self.headings[index - 1].group if index else ""
        classes = {"words": heading.words, "kept": strong, "first": before != heading.group}
        return " ".join(name for name, holds in classes.items() if holds)


def markdown(table: PageTable) -> str:
    """The table as a heading, a pipe table and its notes."""
    title = f"{table.title} ({table.origin})" if table.origin else table.title
    groups = {heading.group for heading in table.headings if heading.group}
    if len(groups) == 1:  # said once, over the table
        title = f"{title}: {groups.pop()}"
    titles = [_strong(f"{h.group}: {h.title}" if h.group and groups else h.title, h.strong) for h in table.headings]
    rules = ["---" if heading.words else "---:" for heading in table.headings]
    rows = [
        [_row_name(row), *(_strong(f"{cell.text} {cell.after}".strip(), cell.strong) for cell in row.cells)]
        for row in table.rows
    ]
    lines = [f"| {' | '.join(cells)} |" for cells in ([table.stub, *titles], ["---", *rules], *rows)]
    return "\n\n".join([f"### {escaped(title)}", "\n".join(lines), *map(escaped, table.notes)])


def _strong(text: str, strong: bool) -> str:
    return f"**{escaped(text)}**" if strong else escaped(text)


def _row_name(row: PageRow) -> str:
    name = escaped(row.name)
    if row.detail and row.detail != row.name:
        name += f" ({escaped(row.detail)})"
    return f"{name}: *{escaped(row.remark)}*" if row.remark else name


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    text = "".join(c if c.isprintable() else " " for c in text)
    return "".join(f"\\{c}" if c in "\\`*_<>[]|" else c for c in text)


def render(template: str, **values: Any) -> str:
    """A page from one of our templates, in the colours of reports; equal values give equal text."""
    import jinja2

    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"bytes": bytes_text, "count": count_text, "duration": duration_text, "listed": listed}
    pages.filters |= {"data_uri": data_uri}
    return unbroken(pages.get_template(template).render(light=variables("light"), dark=variables("dark"), **values))


def data_uri(image: bytes) -> str:
    """A picture as an address that holds it."""
    kind = "jpeg" if image.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def unbroken(html: str) -> str:
    """The page with numbers and their units on one line: the space between them does not break."""
    pieces = _NO_TEXT.split(html)
    pieces[::2] = [_BEFORE_UNIT.sub("\u00a0", text) for text in pieces[::2]]
    return "".join(pieces)
