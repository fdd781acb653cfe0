"""The demo's report: what a run found, as JSON, and one HTML file that needs nothing else to be read."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, floor
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from polymask.benchmarks.records import EpochPoint, LayerStatistics
from polymask.errors import PolymaskError
from polymask.files import write_atomically
from polymask.report import canvas, figures
from polymask.report.page_parts import MUTED, PAPER, bits_text, bytes_text, difference_text, render, share_text


@dataclass(frozen=True)
class MethodResult:
    """What one method reached on a domain, and what it cost."""

    method: str
    test_accuracy: float  # percent
    bytes: int  # of the domain's pack
    bits_per_weight: float
    seconds: float  # of training
    curve: tuple[EpochPoint, ...]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        return cls(**{**values, "curve": tuple(EpochPoint(**p) for p in values["curve"])})


@dataclass(frozen=True)
class ExampleImage:
    """One test image, its class, and the most probable classes, best first."""

    image_png: bytes  # a JPEG will do
    truth: str
    top: tuple[tuple[str, float], ...]  # class, probability

    @property
    def right(self) -> bool:
        return bool(self.top) and self.top[0][0] == self.truth

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        image = base64.b64decode(values["image_png"], validate=True)
        top = tuple((name, probability) for name, probability in values["top"])
        return cls(**{**values, "image_png": image, "top": top})


@dataclass(frozen=True)
class DomainResult:
    """One domain: its data, every method's result, and what the kept one looks like inside."""

    name: str
    title: str
    classes: int
    train_images: int
    test_images: int
    methods: tuple[MethodResult, ...]
    predictions: tuple[ExampleImage, ...]
    layers: tuple[LayerStatistics, ...]
    unchanged: bool  # its outputs are, to the bit, those right after its own training
    components: Mapping[str, int] = field(default_factory=dict)  # bits of the pack, by component

    def result_of(self, method: str) -> MethodResult | None:
        """The result of a method, if it was tried here."""
        return next((result for result in self.methods if result.method == method), None)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        parts = {
            "methods": tuple(map(MethodResult.from_json, values["methods"])),
            "predictions": tuple(map(ExampleImage.from_json, values["predictions"])),
            "layers": tuple(LayerStatistics(**layer) for layer in values["layers"]),
        }
        return cls(**{**values, **parts})


@dataclass(frozen=True)
class DemoResult:
    """A whole demo: one base, its domains one after another, and whether anything moved."""

    base: str
    base_parameters: int
    base_bytes: int
    fingerprint_before: str
    fingerprint_after: str
    domains: tuple[DomainResult, ...]
    seconds: float
    settings: Mapping[str, str]
    environment: Mapping[str, str]
    method: str = "affine-full"  # whose packs are kept; the others are there to compare
    command: str = "polymask demo"

    def __post_init__(self) -> None:
        if not self.domains:
            raise PolymaskError("a demo result needs at least one domain")
        for domain in self.domains:
            if domain.result_of(self.method) is None:
                raise PolymaskError(
                    f"domain {domain.name} has no result of {self.method}; "
                    "give one, or name the method whose packs are kept"
                )

    def kept(self, domain: DomainResult) -> MethodResult:
        """The result of the method whose pack is kept."""
        result = domain.result_of(self.method)
        assert result is not None  # checked when this was made
        return result

    @property
    def nothing_forgotten(self) -> bool:
        """Whether the base and every domain are what they were."""
        same_base = self.fingerprint_before == self.fingerprint_after
        return same_base and all(domain.unchanged for domain in self.domains)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; pictures are base64."""
        return asdict(self, dict_factory=_with_pictures_as_text)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        try:
            domains = tuple(map(DomainResult.from_json, values["domains"]))
            return cls(**{**values, "domains": domains})
        except PolymaskError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise PolymaskError(f"this is not a demo result of this version ({error}); run the demo again") from error


def _with_pictures_as_text(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: base64.b64encode(v).decode() if isinstance(v, bytes) else v for name, v in pairs}


def write_demo_report(path: Path, result: DemoResult) -> None:
    """Write the report: the whole file or nothing."""
    write_atomically(path, demo_page(result).encode())


def demo_page(result: DemoResult) -> str:
    """The report as HTML; equal results give equal text."""
    others = [r.method for domain in result.domains for r in domain.methods]
    methods = list(dict.fromkeys([result.method, *others]))  # the kept one, then those it is compared with
    means = _mean_accuracies(result, methods)
    # Every domain's methods in one order, so that colours agree.
    domains = tuple(
        replace(d, methods=tuple(sorted(d.methods, key=lambda r: methods.index(r.method)))) for d in result.domains
    )
    result = replace(result, domains=domains)
    kept = [result.kept(domain) for domain in domains]
    others = [method for method in means if method != result.method]
    return render(
        "demo.html.j2",
        result=result,
        methods=methods,
        means=means,
        comparisons=[f"{difference_text(means[result.method] - means[method])} {method}" for method in others],
        mean_bytes=fmean(method.bytes for method in kept),
        mean_bits=fmean(method.bits_per_weight for method in kept),
        training_seconds=sum(method.seconds for method in kept),
        share=share_text,
        wrong=lambda domain: _wrong(domain, result.method),
        drawn=_draw(domains),
    )


def _mean_accuracies(result: DemoResult, methods: list[str]) -> dict[str, float]:
    """Mean test accuracy of the methods that were tried on every domain."""
    means = {}
    for method in methods:
        found = [r for domain in result.domains if (r := domain.result_of(method))]
        if len(found) == len(result.domains):
            means[method] = fmean(r.test_accuracy for r in found)
    return means


def _draw(domains: Sequence[DomainResult]) -> dict[str, Any]:
    """The page's figures as SVG, those of a domain with its title; empty where there is nothing to draw."""
    layers = {domain.title: domain.layers for domain in domains if domain.layers}
    bits = {domain.title: domain.components for domain in domains if domain.components}
    limit = figures.largest_scalar(layer for stack in layers.values() for layer in stack)
    return {
        "curves": [(d.title, learning_curves(d.methods, name=f"curves-{i}")) for i, d in enumerate(domains)],
        "size": size_against_accuracy(domains, name="size"),
        "bits": bits_by_component(bits, name="bits") if bits else "",
        "density": figures.density_by_depth(layers, name="density") if layers else "",
        "scalars": [
            (title, figures.scalars_by_depth(stack, name=f"scalars-{i}", limit=limit))
            for i, (title, stack) in enumerate(layers.items())
        ],
    }


def _wrong(domain: DomainResult, method: str) -> int:
    """How many test images of a domain a method gets wrong."""
    found = domain.result_of(method)
    return 0 if found is None else round(domain.test_images * (1 - found.test_accuracy / 100))


def learning_curves(methods: Sequence[MethodResult], *, name: str) -> str:
    """Accuracy on validation, and below it the training loss, epoch by epoch, for each method."""
    curves = {result.method: result.curve for result in methods if result.curve}
    return figures.accuracy_and_loss(curves, name=name)


def size_against_accuracy(domains: Sequence[DomainResult], *, name: str) -> str:
    """Mean test accuracy over the domains against mean bytes a domain: a point for each method."""
    from matplotlib.ticker import EngFormatter

    results: dict[str, list[MethodResult]] = {}
    for domain in domains:
        for result in domain.methods:
            results.setdefault(result.method, []).append(result)
    # A logarithmic axis has no place for nothing.
    sizes = [max(1.0, sum(r.bytes for r in found) / len(found)) for found in results.values()]
    accuracies = [sum(r.test_accuracy for r in found) / len(found) for found in results.values()]
    points = dict(zip(results, zip(sizes, accuracies, strict=True), strict=True))
    with canvas.open_canvas(figures.WIDE, 250) as page:
        axes = page.axes(left=32, right=8, top=24, bottom=38)
        axes.set_xscale("log")
        axes.set_xlim(min(sizes) / 4, max(sizes) * 4)
        low, high = floor((min(accuracies) - 5) / 10), ceil((max(accuracies) + 3) / 10)
        axes.set_ylim(max(0, 10 * low), 10 * high)
        axes.set_yticks([tick for tick in range(0, 101, 10) if tick >= 10 * low])
        axes.xaxis.set_major_formatter(EngFormatter("B"))
        axes.tick_params(which="minor", size=0)
        axes.set_xlabel("bytes a domain, logarithmic")
        canvas.heading(axes, "mean test accuracy, %")
        styles = canvas.method_styles(points)
        for method, (size, accuracy) in points.items():
            axes.plot([size], [accuracy], styles[method].marker, color=styles[method].colour, markersize=7)
        places = canvas.place_names(axes, points)
        for text, place in zip(points, places, strict=True):
            look = {"color": styles[text].colour, "ha": "center", "va": "center_baseline"}
            canvas.write(axes, place.x, place.y, canvas.shortened(text), transform=axes.transAxes, **look)
        told = "; ".join(f"{m} {bytes_text(b)}, {a:.1f} %" for m, (b, a) in points.items())
        return page.svg(name, f"Bytes a domain and mean test accuracy: {told}.")


def bits_by_component(components: Mapping[str, Mapping[str, int]], *, name: str) -> str:
    """A bar for each label, as long as its bits, cut into components."""
    present = [c for c in figures.all_keys(components.values()) if any(b.get(c) for b in components.values())]
    totals = {label: sum(bits.values()) for label, bits in components.items()}
    rows = canvas.key_rows([component.replace("_", " ") for component in present], figures.WIDE)
    top = 8 + canvas.KEY_ROW * len(rows)
    with canvas.open_canvas(figures.WIDE, top + 28 * len(components)) as page:
        axes = page.axes(left=12 + canvas.room_for(components), right=72, top=top, bottom=0)
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
                color=canvas.style_of(index).colour,
                edgecolor=PAPER.light,
                linewidth=1,
            )
            start = {label: begin + length for (label, begin), length in zip(start.items(), lengths, strict=True)}
        for row, (label, total) in enumerate(totals.items()):
            canvas.write(axes, -gap, row, canvas.shortened(label), ha="right", va="center_baseline")
            canvas.write(axes, total + gap, row, bits_text(total), va="center_baseline", color=MUTED.light)
        canvas.key(axes, rows, marker="s")
        told = "; ".join(f"{label} {bits_text(total)}" for label, total in totals.items())
        return page.svg(name, f"Bits of each domain by component: {told}.")
