"""What figures are made of: lines with markers, and words where the eye already is.

Every series has a colour, a marker and a label beside it, so no figure depends on colour alone.
Limits of the axes must be set before labels are placed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

from polymask.report.canvas import FONT_SIZE, LINE_HEIGHT, spread, write
from polymask.report.palette import MUTED, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":")
_LONGEST = 18  # letters of a label
KEY_ROW = 18  # height


@dataclass(frozen=True)
class Style:
    """How one of several series looks."""

    colour: str
    marker: str
    dash: str


def style_of(index: int) -> Style:
    """The look of the series with this index; colours come round again with another dash."""
    turn, place = divmod(index, len(SERIES))
    return Style(SERIES[place].light, _MARKERS[place], _DASHES[turn % len(_DASHES)])


def draw_line(axes: "Axes", x: Sequence[float], y: Sequence[float], index: int) -> None:
    """A series of few points: a line with a marker at each."""
    style = style_of(index)
    axes.plot(x, y, style.dash, color=style.colour, marker=style.marker, clip_on=False)


def draw_dots(axes: "Axes", x: Sequence[float], y: Sequence[float], index: int) -> None:
    """A series of many points: the markers speak, a faint line joins them."""
    style = style_of(index)
    axes.plot(x, y, style.dash, color=style.colour, linewidth=0.8, alpha=0.45)
    axes.plot(x, y, style.marker, color=style.colour, markersize=3.2, clip_on=False)


def heading(axes: "Axes", text: str, *, above: float = 0) -> None:
    """What the vertical axis shows, written over it (and a key of this height) from the left."""
    x = -axes.bbox.x0 / axes.bbox.width
    y = 1 + (9 + above) / axes.bbox.height
    write(axes, x, y, text, transform=axes.transAxes, color=MUTED.light)


def end_labels(axes: "Axes", ends: Mapping[str, float]) -> None:
    """The name of each series right of the axes, as near to its last value as there is room."""
    low, high = axes.get_ylim()
    height, width = axes.bbox.height, axes.bbox.width
    wanted = [height * (end - low) / (high - low) for end in ends.values()]
    places = spread(wanted, LINE_HEIGHT, 0, height)
    for index, (text, place) in enumerate(zip(ends, places, strict=True)):
        style, y = style_of(index), place / height
        at: dict[str, Any] = {"transform": axes.transAxes, "color": style.colour, "clip_on": False}
        axes.plot([1 + 11 / width], [y], style.marker, markersize=4.5, **at)
        write(axes, 1 + 18 / width, y, shortened(text), va="center_baseline", **at)


def key_rows(labels: Iterable[str], width: float) -> list[list[str]]:
    """The labels of a key, in rows that are as wide as the sheet at most."""
    rows: list[list[str]] = [[]]
    for label in labels:
        if rows[-1] and sum(map(_key_width, [*rows[-1], label])) > width:
            rows.append([])
        rows[-1].append(label)
    return rows


def key(axes: "Axes", rows: Sequence[Sequence[str]], *, marker: str | None = None) -> None:
    """Rows of names above the axes, each after its series' marker: for lines that cross a lot."""
    to_axes = axes.transAxes.inverted().transform
    index = 0
    for row, labels in enumerate(rows):
        left, middle = 4.0, axes.bbox.y1 + KEY_ROW * (len(rows) - row - 0.3)
        for label in labels:
            style = style_of(index)
            at: dict[str, Any] = {"transform": axes.transAxes, "color": style.colour}
            x, y = to_axes((left, middle))
            axes.plot([x], [y], marker or style.marker, markersize=5, clip_on=False, **at)
            write(axes, to_axes((left + 8, middle))[0], y, shortened(label), va="center", **at)
            left += _key_width(label)
            index += 1


def point_labels(axes: "Axes", points: Mapping[str, tuple[float, float]]) -> None:
    """The name of each point above it, or where it meets no other point or name."""
    for index, (text, place) in enumerate(zip(points, place_names(axes, points), strict=True)):
        look = {"color": style_of(index).colour, "ha": "center", "va": "center_baseline"}
        write(axes, place.x, place.y, shortened(text), transform=axes.transAxes, **look)


@dataclass(frozen=True)
class Place:
    """Where the middle of a name goes, in parts of the axes, and whether it has room there."""

    x: float
    y: float
    free: bool


def place_names(
    axes: "Axes",
    points: Mapping[str, tuple[float, float]],
    *,
    needed: int | None = None,
    path: Sequence[tuple[float, float]] = (),
) -> list[Place]:
    """A place near each point for its name, those of the first points first.

    From the point with index `needed` on, a name that has no room may be left out, and later names
    may stand in its place. `path` is a line along the axes' directions that names keep away from.
    """
    middles = {text: tuple(axes.transData.transform(point)) for text, point in points.items()}
    boxes = [_box(x, y, 12, 12) for x, y in middles.values()]
    corners = [tuple(axes.transData.transform(point)) for point in path]
    boxes += [_around(a, b) for a, b in pairwise(corners)]
    places = []
    for index, (text, (x, y)) in enumerate(middles.items()):
        width = _width(shortened(text))
        aside, corner = 10 + width / 2, 5 + width / 2
        offsets = [(0.0, 14.0), (0.0, -15.0), (aside, 0.0), (-aside, 0.0)]
        offsets += [(corner, 12.0), (corner, -13.0), (-corner, 12.0), (-corner, -13.0)]
        free = [
            (dx, dy)
            for dx, dy in offsets
            if not any(_meet(_box(x + dx, y + dy, width, LINE_HEIGHT), box) for box in boxes)
            and axes.bbox.x0 <= x + dx - width / 2
            and x + dx + width / 2 <= axes.bbox.x1 + 8
            and axes.bbox.y0 <= y + dy - LINE_HEIGHT / 2
        ]
        dx, dy = (free or offsets)[0]
        if free or needed is None or index < needed:
            boxes.append(_box(x + dx, y + dy, width, LINE_HEIGHT))
        across, up = axes.transAxes.inverted().transform((x + dx, y + dy))
        places.append(Place(across, up, bool(free)))
    return places


def shortened(text: str) -> str:
    """The text, cut where it would leave the sheet."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def whole_numbers(first: int, last: int) -> list[int]:
    """At most six of first … last, evenly spaced."""
    return list(range(first, last + 1, max(1, ceil((last - first) / 5))))


def all_keys(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    """The keys of several mappings, each once, in order of appearance."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _key_width(label: str) -> float:
    return 26 + _width(shortened(label))


def _width(text: str) -> float:
    """About how many pixels the text takes in a reader's sans-serif font."""
    ems = sum(0.3 if c in "fijlrtI.,-' " else 0.85 if c in "mwMW" else 0.58 for c in text)
    return ems * FONT_SIZE


_Box = tuple[float, float, float, float]  # left, bottom, right, top, in pixels


def _box(x: float, y: float, width: float, height: float) -> _Box:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _around(a: Sequence[float], b: Sequence[float]) -> _Box:
    return min(a[0], b[0]), min(a[1], b[1]), max(a[0], b[0]), max(a[1], b[1])


def _meet(a: _Box, b: _Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
