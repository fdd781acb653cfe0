"""Figures of results, each one inline SVG: curves, masks and scalars by depth, sizes, differences.

`name` keeps the ids of a figure apart from those of the others on its page.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any

from polymask.benchmarks.compare import Comparison, Frontier, Point
from polymask.benchmarks.records import EpochPoint, LayerStatistics
from polymask.report import canvas
from polymask.report.page_parts import INK, MUTED, PAPER, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LARGE = 640  # pixels
WIDE = 440  # a phone shows it at four fifths of that
_NARROW = 340  # one of several side by side
_LINEAR = 5.0  # points to both sides of 0 that are drawn to scale
_TICKS = (0, 1, 2, 5, 10, 20, 50, 100)


def accuracy_and_loss(
    curves: Mapping[str, Sequence[EpochPoint]],
    *,
    name: str,
    images: str = "validation",
    measure: str = "accuracy, %",
) -> str:
    """Accuracy, or what else is measured, on some images, and below it the training loss: a line for each method."""
    points = [point for curve in curves.values() for point in curve]
    last = max((point.epoch for point in points), default=1)
    lowest = min((point.val_accuracy for point in points), default=0.0)
    names = 22 + canvas.room_for(curves)
    with canvas.open_canvas(_NARROW, 300) as page:
        accuracy = page.axes(left=32, right=names, top=24, bottom=128)
        loss = page.axes(left=32, right=names, top=208, bottom=38)
        styles = canvas.method_styles(curves)
        for label, curve in curves.items():
            epochs = [point.epoch for point in curve]
            canvas.draw_line(accuracy, epochs, [point.val_accuracy for point in curve], styles[label])
            canvas.draw_line(loss, epochs, [point.loss for point in curve], styles[label])
        if measure.endswith("%"):
            accuracy.set_ylim(max(0, 10 * floor((lowest - 5) / 10)), 100)
        else:
            accuracy.set_ylim(bottom=0)
        loss.set_ylim(bottom=0)
        for axes in (accuracy, loss):
            axes.set_xlim(0.7, last + 0.3)
            axes.set_xticks(whole_numbers(1, last))
        _few_ticks(accuracy, 5)
        _few_ticks(loss, 2)
        accuracy.tick_params(labelbottom=False)
        loss.set_xlabel("epoch")
        canvas.heading(accuracy, f"{images} {measure}")
        canvas.heading(loss, "training loss")
        ends = {label: curve[-1].val_accuracy for label, curve in curves.items()}
        canvas.end_labels(accuracy, ends, styles)
        told = ", ".join(f"{label} {end:.1f}" for label, end in ends.items())
        return page.svg(name, f"Learning curves; {images} {measure}, at the end: {told}.")


def density_by_depth(layers: Mapping[str, Sequence[LayerStatistics]], *, name: str) -> str:
    """The share of ones in every mask, by depth: one series for each label."""
    stacks = {label: stack for label, stack in layers.items() if stack}
    rows = canvas.key_rows(stacks, WIDE)
    key_height = canvas.KEY_ROW * len(rows)
    with canvas.open_canvas(WIDE, 230 + key_height) as page:
        axes = page.axes(left=32, right=8, top=28 + key_height, bottom=38)
        axes.axhline(50, color=MUTED.light, linewidth=1, linestyle=(0, (4, 3)))
        for index, stack in enumerate(stacks.values()):
            # Equal densities would hide each other: half a layer is shared by the series.
            beside = 0.5 * (index + 0.5) / len(stacks) - 0.25
            depths = [layer.depth + beside for layer in stack]
            canvas.draw_dots(axes, depths, [100 * layer.density for layer in stack], canvas.style_of(index))
        axes.set_ylim(0, 100)
        axes.set_yticks([0, 25, 50, 75, 100])
        _depth_axis(axes, stacks.values())
        canvas.heading(axes, "ones in the mask, %", above=key_height + 4)
        canvas.key(axes, rows)
        told = ", ".join(f"{label} {100 * _density(s):.0f} %" for label, s in stacks.items())
        return page.svg(name, f"Share of ones in the masks by depth; over all weights: {told}.")


def scalars_by_depth(layers: Sequence[LayerStatistics], *, name: str, limit: float | None = None) -> str:
    """k1, k2 and k3 by depth; the axis reaches ±limit, or as far as the values do."""
    series = {k: [getattr(layer, k) for layer in layers] for k in ("k1", "k2", "k3")}
    reach = 1.08 * (limit or largest_scalar(layers) or 1.0)
    with canvas.open_canvas(_NARROW, 230) as page:
        axes = page.axes(left=44, right=8, top=26, bottom=38)
        axes.axhline(0, color=MUTED.light, linewidth=1)
        for index, values in enumerate(series.values()):
            canvas.draw_dots(axes, [layer.depth for layer in layers], values, canvas.style_of(index))
        axes.set_ylim(-reach, reach)
        _few_ticks(axes, 5)
        _depth_axis(axes, [layers])
        canvas.key(axes, [list(series)])
        told = ", ".join(f"{k} {min(v):.2g} to {max(v):.2g}" for k, v in series.items() if v)
        return page.svg(name, f"Scalars by depth: {told}.")


def largest_scalar(layers: Iterable[LayerStatistics]) -> float:
    """The largest magnitude of k1, k2 and k3: a common limit for several figures."""
    return max((abs(k) for layer in layers for k in (layer.k1, layer.k2, layer.k3)), default=0.0)


def size_against_score(frontier: Frontier, *, name: str) -> str:
    """A point for each method; those on the frontier are filled, named first, and joined."""
    points, members = frontier.points, frontier.members
    with canvas.open_canvas(_LARGE, 380) as page:
        axes = page.axes(left=44, right=12, top=26, bottom=40)
        # Logarithmic, with a place for methods that add nothing.
        axes.set_xscale("symlog", linthresh=0.1, linscale=0.5)
        largest = max((point.overhead for point in points), default=1.0)
        axes.set_xlim(-0.08, max(1.0, largest) * 2.2)
        axes.set_ylim(*_limits([point.value for point in points]))
        ticks = [0, 0.1, 1, *(tick for tick in (10, 32, 100) if tick <= 2 * largest)]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.tick_params(axis="x", which="minor", size=0)
        axes.set_xlabel("bits a weight that a domain adds, logarithmic")
        canvas.heading(axes, _measured(frontier))
        steps = _steps(members)
        axes.plot([x for x, _ in steps], [y for _, y in steps], color=MUTED.light, linewidth=1.2)
        styles = canvas.method_styles(point.label for point in points)
        for point in points:
            style = styles[point.label]
            fill = style.colour if point.on_frontier else PAPER.light
            look: dict[str, Any] = {"markersize": 7, "markerfacecolor": fill, "markeredgecolor": style.colour}
            axes.plot([point.overhead], [point.value], style.marker, zorder=3, **look)
        others = [point for point in points if not point.on_frontier]
        _name(axes, [*members, *others], len(members), steps, styles)
        told = ", ".join(f"{p.label} ({p.overhead:.2f} bits, {p.value:.1f})" for p in members)
        return page.svg(name, f"{_measured(frontier)} against bits a weight; on the frontier: {told}.")


def points_lost(lost: Mapping[str, float], *, name: str) -> str:
    """A bar for each method: mean points of accuracy lost; to the left it gained."""
    with canvas.open_canvas(440, 30 + 26 * len(lost)) as page:
        axes = page.axes(left=14 + canvas.room_for(lost), right=44, top=26, bottom=4)
        low, high = min(0.0, *lost.values()), max(0.0, *lost.values())
        span = (high - low) or 1.0
        axes.set_xlim(low - (0.12 * span if low < 0 else 0), low + span)
        axes.set_ylim(len(lost) - 0.5, -0.5)
        axes.set_axis_off()
        styles = canvas.method_styles(lost)
        axes.barh(range(len(lost)), list(lost.values()), 0.6, color=[styles[label].colour for label in lost])
        axes.axvline(0, color=MUTED.light, linewidth=1)
        left = axes.get_xlim()[0] - span / 40
        for row, (label, value) in enumerate(lost.items()):
            canvas.write(axes, left, row, canvas.shortened(label), ha="right", va="center_baseline", color=INK.light)
            at = max(value, 0.0) + span / 50
            text = f"{value:.1f}".replace("-0.0", "0.0").replace("-", "−")
            canvas.write(axes, at, row, text, va="center_baseline", color=MUTED.light)
        canvas.heading(axes, "points lost, mean over domains")
        told = ", ".join(f"{label} {value:.1f}" for label, value in lost.items())
        return page.svg(name, f"Mean points of test accuracy lost: {told}.")


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


def _name(
    axes: "Axes",
    points: Sequence[Point],
    members: int,
    path: Sequence[tuple[float, float]],
    styles: Mapping[str, canvas.SeriesStyle],
) -> None:
    """Names where they meet nothing; those on the frontier, which come first, in any case."""
    where = {point.label: (point.overhead, point.value) for point in points}
    places = canvas.place_names(axes, where, needed=members, path=path)
    for point, place in zip(points, places, strict=True):
        if place.free or point.on_frontier:
            look = {"color": styles[point.label].colour, "ha": "center", "va": "center_baseline"}
            canvas.write(axes, place.x, place.y, canvas.shortened(point.label), transform=axes.transAxes, **look)


def differences(comparisons: Sequence[Comparison], *, name: str) -> str:
    """A row for each comparison: a mark for each domain, the mean and its 95 % interval."""
    domains = all_keys(one.by_domain for one in comparisons)
    keyed = len(domains) <= len(SERIES)  # beyond that marks would come twice
    rows = canvas.key_rows(domains, _LARGE) if keyed else []
    top = 28 + canvas.KEY_ROW * len(rows)
    other = comparisons[0].other
    with canvas.open_canvas(_LARGE, top + 30 * len(comparisons) + 38) as page:
        names = 14 + canvas.room_for(one.method for one in comparisons)
        axes = page.axes(left=names, right=104, top=top, bottom=38)
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
        canvas.heading(axes, f"points more than {canvas.shortened(other)}", above=canvas.KEY_ROW * len(rows))
        if keyed:
            canvas.key(axes, rows)
        told = "; ".join(f"{one.method} {one.points}" for one in comparisons)
        return page.svg(name, f"Differences to {other} in test accuracy: {told}.")


def _draw(axes: "Axes", row: int, one: Comparison, domains: Sequence[str], *, keyed: bool) -> None:
    assert one.mean is not None  # the caller draws those that have one
    for domain, points in one.by_domain.items():
        style = canvas.style_of(domains.index(domain))
        marker, hue = (style.marker, style.colour) if keyed else ("o", MUTED.light)
        axes.plot([points], [row + 0.2], marker, color=hue, markersize=4.5)
    told = one.verdict in ("ahead", "behind")
    colour = INK.light if told else MUTED.light
    if one.half_width is not None:
        ends = one.mean - one.half_width, one.mean + one.half_width
        axes.plot(ends, [row - 0.18] * 2, color=colour, linewidth=2)
    axes.plot([one.mean], [row - 0.18], "o", color=colour, markersize=7)
    at = {"transform": axes.get_yaxis_transform(), "va": "center_baseline"}
    canvas.write(axes, -10 / axes.bbox.width, row, canvas.shortened(one.method), ha="right", color=INK.light, **at)
    number = f"{one.difference} {one.interval}"
    canvas.write(axes, 1 + 10 / axes.bbox.width, row, number, color=colour, **at)


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


def _density(layers: Sequence[LayerStatistics]) -> float:
    """The share of ones over all weights."""
    return sum(s.density * s.weights for s in layers) / sum(s.weights for s in layers)


def _depth_axis(axes: "Axes", stacks: Iterable[Sequence[LayerStatistics]]) -> None:
    deepest = max((layer.depth for stack in stacks for layer in stack), default=0)
    axes.set_xlim(-0.5, deepest + 0.5)
    axes.set_xticks(whole_numbers(0, deepest))
    axes.set_xlabel("layer, from input to output")


def _few_ticks(axes: "Axes", most: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))


def whole_numbers(first: int, last: int) -> list[int]:
    """At most six of first … last, evenly spaced."""
    return list(range(first, last + 1, max(1, ceil((last - first) / 5))))


def all_keys(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    """The keys of several mappings, each once, in order of appearance."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))
