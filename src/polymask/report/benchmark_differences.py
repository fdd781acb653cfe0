"""The figure of who is ahead: differences to one method, domain by domain."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polymask.benchmarks.compare import Comparison
from polymask.report.canvas import canvas, write
from polymask.report.marks import KEY_ROW, all_keys, heading, key, key_rows, shortened, style_of
from polymask.report.palette import INK, MUTED, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _ROW = 640, 30
_LEFT, _RIGHT = 128, 104
_LINEAR = 5.0  # points to both sides of 0 that are drawn to scale
_TICKS = (0, 1, 2, 5, 10, 20, 50, 100)


def differences(comparisons: Sequence[Comparison], *, name: str) -> str:
    """A row for each comparison: a mark for each domain, the mean and its 95 % interval."""
    domains = all_keys(one.by_domain for one in comparisons)
    keyed = len(domains) <= len(SERIES)  # beyond that marks would come twice
    rows = key_rows(domains, _WIDTH) if keyed else []
    top = 28 + KEY_ROW * len(rows)
    other = comparisons[0].other
    with canvas(_WIDTH, top + _ROW * len(comparisons) + 38) as sheet:
        axes = sheet.axes(left=_LEFT, right=_RIGHT, top=top, bottom=38)
        # Rows that are far behind must not press the others together.
        axes.set_xscale("symlog", linthresh=_LINEAR, linscale=1.1)
        _horizontal(axes, comparisons)
        axes.set_ylim(len(comparisons) - 0.5, -0.5)
        axes.set_yticks([])
        axes.grid(visible=True, axis="x")
        axes.spines["left"].set_visible(False)
        axes.axvline(0, color=INK.light, linewidth=1)
        for row, one in enumerate(comparisons):
            _draw(axes, row, one, domains, keyed=keyed)
        heading(axes, f"points more than {shortened(other)}", above=KEY_ROW * len(rows))
        if keyed:
            key(axes, rows)
        told = "; ".join(f"{one.method} {one.points}" for one in comparisons)
        return sheet.svg(name, f"Differences to {other} in test accuracy: {told}.")


def _draw(axes: "Axes", row: int, one: Comparison, domains: Sequence[str], *, keyed: bool) -> None:
    assert one.mean is not None  # the caller draws those that have one
    for domain, points in one.by_domain.items():
        style = style_of(domains.index(domain))
        marker, hue = (style.marker, style.colour) if keyed else ("o", MUTED.light)
        axes.plot([points], [row + 0.2], marker, color=hue, markersize=4.5)
    told = one.verdict in ("ahead", "behind")
    colour = INK.light if told else MUTED.light
    if one.half_width is not None:
        ends = one.mean - one.half_width, one.mean + one.half_width
        axes.plot(ends, [row - 0.18] * 2, color=colour, linewidth=2)
    axes.plot([one.mean], [row - 0.18], "o", color=colour, markersize=7)
    at = {"transform": axes.get_yaxis_transform(), "va": "center_baseline"}
    write(axes, -10 / axes.bbox.width, row, shortened(one.method), ha="right", color=INK.light, **at)
    number = f"{one.difference} {one.interval}"
    write(axes, 1 + 10 / axes.bbox.width, row, number, color=colour, **at)


def _horizontal(axes: "Axes", comparisons: Sequence[Comparison]) -> None:
    reach = [0.0]
    for one in comparisons:
        reach += one.by_domain.values()
        if one.mean is not None and one.half_width is not None:
            reach += [one.mean - one.half_width, one.mean + one.half_width]
    low, high = min(reach), max(reach)
    low, high = min(-1.0, 1.12 * low), max(1.0, 1.12 * high)
    axes.set_xlim(low, high)
    ticks = sorted({sign * tick for tick in _TICKS for sign in (1, -1) if low <= sign * tick <= high})
    axes.set_xticks(ticks, [f"{tick:+g}".replace("-", "−") if tick else "0" for tick in ticks])
    axes.tick_params(axis="x", which="minor", size=0)
    axes.set_xlabel(f"points; even within ±{_LINEAR:g}, logarithmic beyond")
