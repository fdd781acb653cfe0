"""What figures are drawn with: colours, a canvas of matplotlib that becomes an inline SVG, lines, marks and labels.

Colours have a role, and one value on light paper, one on dark. Those of series are Okabe and Ito's, which colour-blind
readers can tell apart, made darker on light paper and lighter on dark until text in them has a contrast of 4.5 : 1.
Every series has a colour, a marker and a label beside it, so no figure depends on colour alone.

The SVG follows the page: colours become CSS variables (with the light theme's value where a page sets none), text stays
text in the page's font, one unit is one CSS pixel. It holds no dates, and its ids depend on its name and content alone,
so equal drawings are equal bytes.
"""

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from zlib import crc32

from polymask.benchmarks.records import method_of
from polymask.errors import PolymaskError
from polymask.report.page_parts import COLOURS, INK, LINE, MUTED, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


FONT_SIZE = 11.5
LINE_HEIGHT = 1.3 * FONT_SIZE
_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "polymask",
    "font.family": "sans-serif",
    "font.size": FONT_SIZE,
    "text.color": INK.light,
    "axes.labelsize": FONT_SIZE,
    "axes.labelcolor": MUTED.light,
    "axes.edgecolor": MUTED.light,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.facecolor": "none",
    "axes.unicode_minus": True,
    "grid.color": LINE.light,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED.light,
    "ytick.color": MUTED.light,
    "xtick.labelsize": FONT_SIZE - 0.5,
    "ytick.labelsize": FONT_SIZE - 0.5,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 1.75,
    "lines.markersize": 4.5,
    "figure.facecolor": "none",
    "figure.dpi": 72,
    "savefig.facecolor": "none",
    "savefig.dpi": 72,
}
_COLOUR_OF = {colour.light: colour for colour in COLOURS}


@dataclass(frozen=True)
class Canvas:
    """A figure of a size in CSS pixels."""

    figure: "Figure"
    width: int
    height: int

    def axes(self, *, left: float, right: float, top: float, bottom: float) -> "Axes":
        """Axes whose frame keeps these distances, in pixels, from the canvas's edges."""
        width, height = self.width - left - right, self.height - top - bottom
        box = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(box)

    def svg(self, name: str, description: str) -> str:
        """The drawing as an SVG element; `name` keeps its ids apart from other figures'."""
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        with warnings.catch_warnings():
            # The reader's browser sets the text; it does not matter what matplotlib's font lacks.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            self.figure.savefig(file, format="svg", metadata=nothing)
        return _for_pages(file.getvalue(), name, description, self.width, self.height)


@contextmanager
def open_canvas(width: int, height: int) -> Iterator[Canvas]:
    """Open an empty canvas; our style holds inside the `with` block only."""
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PolymaskError(f"figures need matplotlib ({error}); pip install 'polymask[plot]'") from error
    with matplotlib.style.context(["default", _STYLE]):
        yield Canvas(Figure(figsize=(width / 72, height / 72)), width, height)


def plain_text(text: str) -> str:
    """Text without characters that no SVG may hold."""
    return "".join(c for c in text if c.isprintable())


def write(axes: "Axes", x: float, y: float, text: str, **style: Any) -> None:
    """Put text on the axes as it stands: a dollar sign is a dollar sign, not a formula."""
    axes.text(x, y, plain_text(text), parse_math=False, **style)


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places moved apart until neighbours are `gap` from each other, in the same order.

    They stay within low … high where there is room for all, and each is where it was if nothing is in its way.
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    edge = low
    for i in order:
        moved[i] = max(moved[i], edge)
        edge = moved[i] + gap
    edge = high
    for i in reversed(order):
        moved[i] = min(moved[i], edge)
        edge = moved[i] - gap
    return moved


def _for_pages(svg: str, name: str, description: str, width: int, height: int) -> str:
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            # Matplotlib's style sheet would hold for the whole page.
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    used = set(re.findall(r"url\(#([^)]+)\)", svg)) | set(re.findall(r'href="#([^"]+)"', svg))
    for element in root.iter():
        _tidy(element, name, used)
    root.attrib = {
        "viewBox": f"0 0 {width} {height}",
        "width": str(width),
        "height": str(height),
        "role": "img",
        "aria-label": plain_text(description),
        "style": "stroke-linejoin: round; font-family: inherit",
    }
    ElementTree.register_namespace("", _SVG)
    return re.sub(r">\s+<", "><", ElementTree.tostring(root, encoding="unicode"))


def _tidy(element: ElementTree.Element, name: str, used: set[str]) -> None:
    """Keep only ids that are used, made this figure's own; colours by role; the page's font."""
    identity = element.attrib.pop("id", None)
    if identity in used:
        element.set("id", f"{name}-{identity}")
    if _HREF in element.attrib:
        element.set("href", f"#{name}-{element.attrib.pop(_HREF)[1:]}")
    for key in ("clip-path", "style"):
        if key in element.attrib:
            value = element.attrib[key].replace("url(#", f"url(#{name}-")
            value = re.sub(r"#[0-9a-f]{6}\b", _variable, value)
            element.set(key, re.sub(r"font: ([\d.]+px) [^;]*", r"font-size: \1", value))


def _variable(colour: re.Match[str]) -> str:
    known = _COLOUR_OF.get(colour[0])
    return f"var(--{known.role}, {known.light})" if known else colour[0]


_MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":")
# Those that readers compare first have a colour of their own; later ones share it, with another marker and dash.
_METHODS = (
    *("affine-full", "finetune", "classifier-only", "piggyback", "affine-simple", "bitdelta", "lora-conv"),
    *("parallel-adapter", "series-adapter", "bn-only", "piggyback-bn", "packnet", "ba2", "covnorm"),
    *("spottune", "dan", "progressive", "mtan", "lwf", "ewc", "pa-svd"),
)
_LONGEST = 30  # letters of a label
KEY_ROW = 18  # height


@dataclass(frozen=True)
class SeriesStyle:
    """How one of several series looks."""

    colour: str
    marker: str
    dash: str


def style_of(index: int) -> SeriesStyle:
    """The look of the series with this index; colours come round again with another marker and dash."""
    turn, place = divmod(index, len(SERIES))
    return SeriesStyle(SERIES[place].light, _MARKERS[(place + turn) % len(_MARKERS)], _DASHES[turn % len(_DASHES)])


def method_styles(labels: Iterable[str]) -> dict[str, SeriesStyle]:
    """The look of each method, named as it is or as tables call it: its colour is the same in every figure.

    One that is there again, with other options or in another order, keeps the colour and has another marker and dash.
    """
    styles: dict[str, SeriesStyle] = {}
    seen: dict[str, int] = {}
    for label in dict.fromkeys(labels):
        method = method_of(label)
        again = seen[method] = seen.get(method, -1) + 1
        index = _METHODS.index(method) if method in _METHODS else crc32(method.encode("utf-8", "replace"))
        styles[label] = style_of(index + again * len(SERIES))
    return styles


def draw_line(axes: "Axes", x: Sequence[float], y: Sequence[float], style: SeriesStyle) -> None:
    """A series of few points: a line with a marker at each."""
    axes.plot(x, y, style.dash, color=style.colour, marker=style.marker, clip_on=False)


def draw_dots(axes: "Axes", x: Sequence[float], y: Sequence[float], style: SeriesStyle) -> None:
    """A series of many points: the markers speak, a faint line joins them."""
    axes.plot(x, y, style.dash, color=style.colour, linewidth=0.8, alpha=0.45)
    axes.plot(x, y, style.marker, color=style.colour, markersize=3.2, clip_on=False)


def heading(axes: "Axes", text: str, *, above: float = 0) -> None:
    """What the vertical axis shows, written over it (and a key of this height) from the left."""
    x = -axes.bbox.x0 / axes.bbox.width
    y = 1 + (9 + above) / axes.bbox.height
    write(axes, x, y, text, transform=axes.transAxes, color=MUTED.light)


def end_labels(axes: "Axes", ends: Mapping[str, float], styles: Mapping[str, SeriesStyle]) -> None:
    """The name of each series right of the axes, as near to its last value as there is room."""
    low, high = axes.get_ylim()
    height, width = axes.bbox.height, axes.bbox.width
    wanted = [height * (end - low) / (high - low) for end in ends.values()]
    places = spread(wanted, LINE_HEIGHT, 0, height)
    for text, place in zip(ends, places, strict=True):
        style, y = styles[text], place / height
        at: dict[str, Any] = {"transform": axes.transAxes, "color": style.colour, "clip_on": False}
        axes.plot([1 + 11 / width], [y], style.marker, markersize=4.5, **at)
        write(axes, 1 + 18 / width, y, shortened(text), va="center_baseline", **at)


def key_rows(labels: Iterable[str], width: float) -> list[list[str]]:
    """The labels of a key, in rows that are as wide as the canvas at most."""
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
    low, left, right = axes.bbox.y0, axes.bbox.x0, axes.bbox.x1 + 8
    for index, (text, (x, y)) in enumerate(middles.items()):
        width = text_width(shortened(text))
        aside, corner = 10 + width / 2, 5 + width / 2
        offsets = [(0.0, 14.0), (0.0, -15.0), (aside, 0.0), (-aside, 0.0)]
        offsets += [(corner, 12.0), (corner, -13.0), (-corner, 12.0), (-corner, -13.0)]
        free = [
            (dx, dy)
            for dx, dy in offsets
            if left <= x + dx - width / 2
            and x + dx + width / 2 <= right
            and low <= y + dy - LINE_HEIGHT / 2
            and not any(_meet(_box(x + dx, y + dy, width, LINE_HEIGHT), box) for box in boxes)
        ]
        dx, dy = (free or offsets)[0]
        if free or needed is None or index < needed:
            boxes.append(_box(x + dx, y + dy, width, LINE_HEIGHT))
        across, up = axes.transAxes.inverted().transform((x + dx, y + dy))
        places.append(Place(across, up, bool(free)))
    return places


def room_for(labels: Iterable[str]) -> float:
    """The pixels that the longest of these labels takes beside the axes."""
    return max((text_width(shortened(label)) for label in labels), default=0.0)


def shortened(text: str) -> str:
    """The text, cut where it is longer than a label may be."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _key_width(label: str) -> float:
    return 26 + text_width(shortened(label))


def text_width(text: str) -> float:
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
