"""A sheet to draw on with matplotlib, and its way into a page: one small inline SVG.

The SVG follows the page: colours become CSS variables (with the light theme's value where a page
sets none), text stays text in the page's font, one unit is one CSS pixel. It holds no dates, and
its ids depend on its name and content alone, so equal drawings are equal bytes.
"""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from polymask.errors import PolymaskError
from polymask.report.palette import COLOURS, INK, LINE, MUTED, PAPER

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
        """Axes whose frame keeps these distances, in pixels, from the sheet's edges."""
        width, height = self.width - left - right, self.height - top - bottom
        box = (
            left / self.width,
            bottom / self.height,
            width / self.width,
            height / self.height,
        )
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
def canvas(width: int, height: int) -> Iterator[Canvas]:
    """Open an empty sheet; our style holds inside the `with` block only."""
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PolymaskError(f"figures need matplotlib ({error}); pip install 'polymask[plot]'") from error
    with matplotlib.style.context(["default", _STYLE]):
        yield Canvas(Figure(figsize=(width / 72, height / 72)), width, height)


def as_file(svg: str) -> str:
    """A drawing that stands in no page: on light paper, in a font of its own."""
    alone = f"font-family: sans-serif; background: {PAPER.light}"
    return svg.replace("font-family: inherit", alone, 1)


def plain_text(text: str) -> str:
    """Text without characters that no SVG may hold."""
    return "".join(c for c in text if c.isprintable())


def write(axes: "Axes", x: float, y: float, text: str, **style: Any) -> None:
    """Put text on the axes as it stands: a dollar sign is a dollar sign, not a formula."""
    axes.text(x, y, plain_text(text), parse_math=False, **style)


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places moved apart until neighbours are `gap` from each other, in the same order.

    They stay within low … high where there is room for all, and each is where it was if nothing
    is in its way.
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
