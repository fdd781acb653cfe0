"""Figures of results, each one inline SVG: curves, masks and scalars by depth, and costs.

`name` keeps the ids of a figure apart from those of the others on its page.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor
from typing import TYPE_CHECKING

from polymask.benchmarks.records import EpochPoint, LayerStatistics
from polymask.report.canvas import (
    KEY_ROW,
    MUTED,
    PAPER,
    all_keys,
    canvas,
    draw_dots,
    draw_line,
    end_labels,
    heading,
    key,
    key_rows,
    point_labels,
    shortened,
    style_of,
    whole_numbers,
    write,
)
from polymask.report.sheet import bits_text, bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import Formatter

    from polymask.report.demo_page import DomainResult, MethodResult


_WIDE = 440  # pixels; a phone shows it at four fifths of that
_NARROW = 340  # one of several side by side


def learning_curves(methods: "Sequence[MethodResult]", *, name: str) -> str:
    """Accuracy on validation, and below it the training loss, epoch by epoch, for each method."""
    curves = {result.method: result.curve for result in methods if result.curve}
    return accuracy_and_loss(curves, name=name)


def accuracy_and_loss(curves: Mapping[str, Sequence[EpochPoint]], *, name: str, images: str = "validation") -> str:
    """Accuracy on some images, and below it the training loss: a line for each label."""
    points = [point for curve in curves.values() for point in curve]
    last = max((point.epoch for point in points), default=1)
    lowest = min((point.val_accuracy for point in points), default=0.0)
    with canvas(_NARROW, 300) as sheet:
        accuracy = sheet.axes(left=32, right=104, top=24, bottom=128)
        loss = sheet.axes(left=32, right=104, top=208, bottom=38)
        for index, curve in enumerate(curves.values()):
            epochs = [point.epoch for point in curve]
            draw_line(accuracy, epochs, [point.val_accuracy for point in curve], index)
            draw_line(loss, epochs, [point.loss for point in curve], index)
        accuracy.set_ylim(max(0, 10 * floor((lowest - 5) / 10)), 100)
        loss.set_ylim(bottom=0)
        for axes in (accuracy, loss):
            axes.set_xlim(0.7, last + 0.3)
            axes.set_xticks(whole_numbers(1, last))
        _few_ticks(accuracy, 5)
        _few_ticks(loss, 2)
        accuracy.tick_params(labelbottom=False)
        loss.set_xlabel("epoch")
        heading(accuracy, f"{images} accuracy, %")
        heading(loss, "training loss")
        ends = {label: curve[-1].val_accuracy for label, curve in curves.items()}
        end_labels(accuracy, ends)
        told = ", ".join(f"{label} {end:.1f} %" for label, end in ends.items())
        return sheet.svg(name, f"Learning curves; {images} accuracy at the end: {told}.")


def density_by_depth(layers: Mapping[str, Sequence[LayerStatistics]], *, name: str) -> str:
    """The share of ones in every mask, by depth: one series for each label."""
    stacks = {label: stack for label, stack in layers.items() if stack}
    rows = key_rows(stacks, _WIDE)
    key_height = KEY_ROW * len(rows)
    with canvas(_WIDE, 230 + key_height) as sheet:
        axes = sheet.axes(left=32, right=8, top=28 + key_height, bottom=38)
        axes.axhline(50, color=MUTED.light, linewidth=1, linestyle=(0, (4, 3)))
        for index, stack in enumerate(stacks.values()):
            # Equal densities would hide each other: half a layer is shared by the series.
            beside = 0.5 * (index + 0.5) / len(stacks) - 0.25
            depths = [layer.depth + beside for layer in stack]
            draw_dots(axes, depths, [100 * layer.density for layer in stack], index)
        axes.set_ylim(0, 100)
        axes.set_yticks([0, 25, 50, 75, 100])
        _depth_axis(axes, stacks.values())
        heading(axes, "ones in the mask, %", above=key_height + 4)
        key(axes, rows)
        told = ", ".join(f"{label} {100 * _density(s):.0f} %" for label, s in stacks.items())
        return sheet.svg(name, f"Share of ones in the masks by depth; over all weights: {told}.")


def scalars_by_depth(layers: Sequence[LayerStatistics], *, name: str, limit: float | None = None) -> str:
    """k1, k2 and k3 by depth; the axis reaches ±limit, or as far as the values do."""
    series = {k: [getattr(layer, k) for layer in layers] for k in ("k1", "k2", "k3")}
    reach = 1.08 * (limit or largest_scalar(layers) or 1.0)
    with canvas(_NARROW, 230) as sheet:
        axes = sheet.axes(left=44, right=8, top=26, bottom=38)
        axes.axhline(0, color=MUTED.light, linewidth=1)
        for index, values in enumerate(series.values()):
            draw_dots(axes, [layer.depth for layer in layers], values, index)
        axes.set_ylim(-reach, reach)
        _few_ticks(axes, 5)
        _depth_axis(axes, [layers])
        key(axes, [list(series)])
        told = ", ".join(f"{k} {min(v):.2g} to {max(v):.2g}" for k, v in series.items() if v)
        return sheet.svg(name, f"Scalars by depth: {told}.")


def largest_scalar(layers: Iterable[LayerStatistics]) -> float:
    """The largest magnitude of k1, k2 and k3: a common limit for several figures."""
    return max((abs(k) for layer in layers for k in (layer.k1, layer.k2, layer.k3)), default=0.0)


def size_against_accuracy(domains: "Sequence[DomainResult]", *, name: str) -> str:
    """Mean test accuracy over the domains against mean bytes a domain: a point for each method."""
    results: dict[str, list[MethodResult]] = {}
    for domain in domains:
        for result in domain.methods:
            results.setdefault(result.method, []).append(result)
    # A logarithmic axis has no place for nothing.
    sizes = [max(1.0, sum(r.bytes for r in found) / len(found)) for found in results.values()]
    accuracies = [sum(r.test_accuracy for r in found) / len(found) for found in results.values()]
    points = dict(zip(results, zip(sizes, accuracies, strict=True), strict=True))
    with canvas(_WIDE, 250) as sheet:
        axes = sheet.axes(left=32, right=8, top=24, bottom=38)
        axes.set_xscale("log")
        axes.set_xlim(min(sizes) / 4, max(sizes) * 4)
        low, high = floor((min(accuracies) - 5) / 10), ceil((max(accuracies) + 3) / 10)
        axes.set_ylim(max(0, 10 * low), 10 * high)
        axes.set_yticks([tick for tick in range(0, 101, 10) if tick >= 10 * low])
        axes.xaxis.set_major_formatter(_bytes_axis())
        axes.tick_params(which="minor", size=0)
        axes.set_xlabel("bytes a domain, logarithmic")
        heading(axes, "mean test accuracy, %")
        for index, (size, accuracy) in enumerate(points.values()):
            style = style_of(index)
            axes.plot([size], [accuracy], style.marker, color=style.colour, markersize=7)
        point_labels(axes, points)
        told = "; ".join(f"{m} {bytes_text(b)}, {a:.1f} %" for m, (b, a) in points.items())
        return sheet.svg(name, f"Bytes a domain and mean test accuracy: {told}.")


def bits_by_component(components: Mapping[str, Mapping[str, int]], *, name: str) -> str:
    """A bar for each label, as long as its bits, cut into components."""
    present = [c for c in all_keys(components.values()) if any(b.get(c) for b in components.values())]
    totals = {label: sum(bits.values()) for label, bits in components.items()}
    rows = key_rows([component.replace("_", " ") for component in present], _WIDE)
    top = 8 + KEY_ROW * len(rows)
    with canvas(_WIDE, top + 28 * len(components)) as sheet:
        axes = sheet.axes(left=112, right=72, top=top, bottom=0)
        longest = max(totals.values()) or 1
        gap = longest / 50
        axes.set_xlim(0, longest)
        axes.set_ylim(len(components) - 0.5, -0.5)
        axes.set_axis_off()
        start = dict.fromkeys(components, 0)
        for index, component in enumerate(present):
            lengths = [bits.get(component, 0) for bits in components.values()]
            axes.barh(
                range(len(components)),
                lengths,
                0.62,
                left=list(start.values()),
                color=style_of(index).colour,
                edgecolor=PAPER.light,
                linewidth=1,
            )
            start = {label: begin + length for (label, begin), length in zip(start.items(), lengths, strict=True)}
        for row, (label, total) in enumerate(totals.items()):
            write(axes, -gap, row, shortened(label), ha="right", va="center_baseline")
            write(axes, total + gap, row, bits_text(total), va="center_baseline", color=MUTED.light)
        key(axes, rows, marker="s")
        told = "; ".join(f"{label} {bits_text(total)}" for label, total in totals.items())
        return sheet.svg(name, f"Bits of each domain by component: {told}.")


def _density(layers: Sequence[LayerStatistics]) -> float:
    """The share of ones over all weights."""
    return sum(s.density * s.weights for s in layers) / sum(s.weights for s in layers)


def _depth_axis(axes: "Axes", stacks: Iterable[Sequence[LayerStatistics]]) -> None:
    deepest = max((layer.depth for stack in stacks for layer in stack), default=0)
    axes.set_xlim(-0.5, deepest + 0.5)
    axes.set_xticks(whole_numbers(0, deepest))
    axes.set_xlabel("layer, from input to output")


def _bytes_axis() -> "Formatter":
    from matplotlib.ticker import EngFormatter

    return EngFormatter("B")


def _few_ticks(axes: "Axes", most: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
