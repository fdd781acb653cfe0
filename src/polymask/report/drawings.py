"""The figures of a benchmark's report: size against score, who is ahead, points lost, curves, layers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import TYPE_CHECKING

from polymask.benchmarks.compare import Comparison, Frontier, Point
from polymask.benchmarks.findings import FULL, Findings, LayerSummary, which_piggyback
from polymask.benchmarks.records import DomainOutcome, EpochPoint
from polymask.benchmarks.tables import ResultRow, ResultTable
from polymask.report.canvas import (
    INK,
    KEY_ROW,
    MUTED,
    PAPER,
    SERIES,
    all_keys,
    canvas,
    heading,
    key,
    key_rows,
    place_names,
    shortened,
    style_of,
    write,
)
from polymask.report.figures import accuracy_and_loss, density_by_depth, largest_scalar, scalars_by_depth

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
                [point.overhead], [point.value], "o", zorder=3, markersize=7, markerfacecolor=fill, markeredgecolor=edge
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


_MOST_CURVES = 6  # in one figure
_MOST_DENSITIES = 5
_CURVES_FIRST = ("finetune", "affine-full", "piggyback", "classifier-only", "affine-simple")

Titled = tuple[str, str]  # a figure's title and its SVG


@dataclass(frozen=True)
class Drawings:
    """A report's figures as SVG; empty where there is nothing to draw."""

    size: str
    ahead: str
    lost: str
    densities: list[Titled]
    densities_of: str  # which Piggyback they show
    scalars: list[Titled]
    curves: list[Titled]
    curves_of: str  # the methods that the curves show, and of which images
    curves_without: int  # how many methods they do not show


def draw(findings: Findings) -> Drawings:
    """Draw what there are data for."""
    table = findings.table
    lost = {loss.label: loss.mean for loss in findings.forgotten.losses if loss.mean is not None}
    chosen = _chosen(table.rows)
    images = {"val": "validation", "test": "test"}.get(table.plan.selection, "training")
    curves = list(_curves(table, chosen, images))
    return Drawings(
        size=size_against_score(findings.frontier, name="size") if findings.frontier.points else "",
        ahead=_ahead(findings),
        lost=points_lost(lost, name="lost") if lost else "",
        densities=list(_densities(findings.layers)),
        densities_of=which_piggyback(findings.layers),
        scalars=list(_scalars(findings.layers)),
        curves=curves,
        curves_of=f"Accuracy on {images} images after each epoch, and the training loss during it",
        curves_without=sum(bool(row.outcomes) for row in table.rows) - len(chosen),
    )


def _ahead(findings: Findings) -> str:
    against = findings.comparisons.get("finetune", ())
    found = [one for one in against if one.mean is not None]
    return differences(found, name="ahead") if found else ""


def _densities(anatomies: Sequence[LayerSummary]) -> Iterator[Titled]:
    by_method: dict[str, list[LayerSummary]] = {}
    for one in anatomies:
        by_method.setdefault(one.label, []).append(one)
    for label, found in by_method.items():
        figures = -(-len(found) // _MOST_DENSITIES)
        each = -(-len(found) // figures)
        for start in range(0, len(found), each):
            stacks = {one.domain: one.layers for one in found[start : start + each]}
            name = f"density-{found[0].method}-{start}"
            yield label, density_by_depth(stacks, name=name)


def _scalars(anatomies: Sequence[LayerSummary]) -> Iterator[Titled]:
    full = [one for one in anatomies if one.method == FULL]
    limit = largest_scalar(layer for one in full for layer in one.layers)
    for place, one in enumerate(full):
        yield one.domain, scalars_by_depth(one.layers, name=f"scalars-{place}", limit=limit)


def _chosen(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The methods that readers compare first, in the plan's order."""
    done = [row for row in rows if row.outcomes]
    rank = {method: place for place, method in enumerate(_CURVES_FIRST)}
    first = sorted(done, key=lambda row: rank.get(row.method, len(rank)))[:_MOST_CURVES]
    return [row for row in done if row in first]


def _curves(table: ResultTable, chosen: Sequence[ResultRow], images: str) -> Iterator[Titled]:
    for place, domain in enumerate(table.plan.domains):
        curves: dict[str, list[EpochPoint]] = {}
        for row in chosen:
            found = row.found_on(domain)
            if found and (points := _points(found)):
                curves[row.label] = points
        if curves:
            yield domain, accuracy_and_loss(curves, name=f"curves-{place}", images=images)


def _points(found: Mapping[int, DomainOutcome]) -> list[EpochPoint]:
    """The first seed's epochs, counted through all stages of its training."""
    points = []
    for place, epoch in enumerate(found[min(found)].epochs):
        held_out = epoch.get("val_accuracy")
        accuracy = epoch.get("train_accuracy") if held_out is None else held_out
        loss = epoch.get("loss")
        if accuracy is not None and loss is not None:
            points.append(EpochPoint(place + 1, loss, accuracy))
    return points
