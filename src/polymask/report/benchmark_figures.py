"""Figures of a benchmark's runs: size against score with the frontier, and points lost."""

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from typing import TYPE_CHECKING

from polymask.benchmarks.frontier import Frontier, Point
from polymask.report.canvas import canvas, write
from polymask.report.marks import heading, place_names, shortened
from polymask.report.palette import INK, MUTED, PAPER, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 640
_MEMBER = SERIES[0].light


def size_against_score(frontier: Frontier, *, name: str) -> str:
    """A point for each method; those on the frontier are filled, named first, and joined."""
    points, members = frontier.points, frontier.members
    with canvas(_WIDTH, 380) as sheet:
        axes = sheet.axes(left=44, right=12, top=26, bottom=40)
        # Logarithmic, with a place for methods that add nothing.
        axes.set_xscale("symlog", linthresh=0.1, linscale=0.5)
        largest = max((point.overhead for point in points), default=1.0)
        axes.set_xlim(-0.08, max(1.0, largest) * 2.2)
        axes.set_ylim(*_limits([point.value for point in points]))
        ticks = [0, 0.1, 1, *(tick for tick in (10, 32, 100) if tick <= 2 * largest)]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.tick_params(axis="x", which="minor", size=0)
        axes.set_xlabel("bits a weight that a domain adds, logarithmic")
        heading(axes, _measured(frontier))
        steps = _steps(members)
        axes.plot([x for x, _ in steps], [y for _, y in steps], color=_MEMBER, linewidth=1.2)
        for point in points:
            fill = _MEMBER if point.on_frontier else PAPER.light
            edge = _MEMBER if point.on_frontier else MUTED.light
            axes.plot(
                [point.overhead],
                [point.value],
                "o",
                zorder=3,
                markersize=7,
                markerfacecolor=fill,
                markeredgecolor=edge,
            )
        others = [point for point in points if not point.on_frontier]
        _name(axes, [*members, *others], len(members), steps)
        told = ", ".join(f"{p.label} ({p.overhead:.2f} bits, {p.value:.1f})" for p in members)
        return sheet.svg(name, f"{_measured(frontier)} against bits a weight; on the frontier: {told}.")


def points_lost(lost: Mapping[str, float], *, name: str) -> str:
    """A bar for each method: mean points of accuracy lost; to the left it gained."""
    with canvas(440, 30 + 26 * len(lost)) as sheet:
        axes = sheet.axes(left=116, right=44, top=26, bottom=4)
        low, high = min(0.0, *lost.values()), max(0.0, *lost.values())
        span = (high - low) or 1.0
        axes.set_xlim(low - (0.12 * span if low < 0 else 0), low + span)
        axes.set_ylim(len(lost) - 0.5, -0.5)
        axes.set_axis_off()
        axes.barh(range(len(lost)), list(lost.values()), 0.6, color=SERIES[1].light)
        axes.axvline(0, color=MUTED.light, linewidth=1)
        left = axes.get_xlim()[0] - span / 40
        for row, (label, value) in enumerate(lost.items()):
            write(axes, left, row, label, ha="right", va="center_baseline", color=INK.light)
            at = max(value, 0.0) + span / 50
            text = f"{value:.1f}".replace("-0.0", "0.0").replace("-", "−")
            write(axes, at, row, text, va="center_baseline", color=MUTED.light)
        heading(axes, "points lost, mean over domains")
        told = ", ".join(f"{label} {value:.1f}" for label, value in lost.items())
        return sheet.svg(name, f"Mean points of test accuracy lost: {told}.")


def _measured(frontier: Frontier) -> str:
    return "score" if frontier.measure == "score" else "mean test accuracy, %"


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Round numbers around the values, with room for names."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    span = max(high - low, 1.0)
    step = 10.0 ** floor(log10(span))
    step /= next(parts for parts, most in ((5, 2), (2, 5), (1, 10)) if span <= most * step)
    least = step * floor((low - 0.4 * step) / step)
    return max(0.0, least), step * ceil((high + 0.4 * step) / step)


def _steps(members: Sequence[Point]) -> list[tuple[float, float]]:
    """The frontier's corners: at each size the best that fits."""
    corners: list[tuple[float, float]] = []
    for point in members:
        corners += [(point.overhead, corners[-1][1])] if corners else []
        corners.append((point.overhead, point.value))
    return corners


def _name(axes: "Axes", points: Sequence[Point], members: int, path: Sequence[tuple[float, float]]) -> None:
    """Names where they meet nothing; those on the frontier, which come first, in any case."""
    where = {point.label: (point.overhead, point.value) for point in points}
    places = place_names(axes, where, needed=members, path=path)
    for point, place in zip(points, places, strict=True):
        if place.free or point.on_frontier:
            colour = _MEMBER if point.on_frontier else MUTED.light
            look = {"color": colour, "ha": "center", "va": "center_baseline"}
            write(axes, place.x, place.y, shortened(point.label), transform=axes.transAxes, **look)
