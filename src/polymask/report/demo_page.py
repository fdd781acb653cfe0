"""The demo's report: what a run found, as JSON, and one HTML file that needs nothing else to be read."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from polymask.benchmarks.records import EpochPoint, LayerStatistics
from polymask.errors import PolymaskError
from polymask.files import write_atomically
from polymask.report import canvas as palette
from polymask.report import figures
from polymask.report import sheet as wording


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
        """Read what `DemoResult.to_json` wrote of it."""
        return cls(**{**values, "curve": tuple(EpochPoint(**p) for p in values["curve"])})


@dataclass(frozen=True)
class Prediction:
    """One test image, its class, and the most probable classes, best first."""

    image_png: bytes  # a JPEG will do
    truth: str
    top: tuple[tuple[str, float], ...]  # class, probability

    @property
    def right(self) -> bool:
        """Whether the first class is the true one."""
        return bool(self.top) and self.top[0][0] == self.truth

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `DemoResult.to_json` wrote of it."""
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
    predictions: tuple[Prediction, ...]
    layers: tuple[LayerStatistics, ...]
    unchanged: bool  # its outputs are, to the bit, those right after its own training
    components: Mapping[str, int] = field(default_factory=dict)  # bits of the pack, by component

    def result_of(self, method: str) -> MethodResult | None:
        """The result of a method, if it was tried here."""
        return next((result for result in self.methods if result.method == method), None)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `DemoResult.to_json` wrote of it."""
        parts = {
            "methods": tuple(map(MethodResult.from_json, values["methods"])),
            "predictions": tuple(map(Prediction.from_json, values["predictions"])),
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
        return {f.name: _json_value(getattr(self, f.name)) for f in fields(self)}

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


def _json_value(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _json_value(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


_TEMPLATES = Path(__file__).parent / "templates"


def write_demo_report(path: Path, result: DemoResult) -> None:
    """Write the report: the whole file or nothing."""
    write_atomically(path, demo_page(result).encode())


def demo_page(result: DemoResult) -> str:
    """The report as HTML; equal results give equal text."""
    import jinja2

    page = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters |= {
        "bytes": wording.bytes_text,
        "count": wording.count_text,
        "duration": wording.duration_text,
        "listed": wording.listed,
        "data_uri": _data_uri,
    }
    methods = _methods(result)
    means = _mean_accuracies(result, methods)
    result = _with_methods_in_order(result, methods)
    kept = [result.kept(domain) for domain in result.domains]
    return page.get_template("demo.html.j2").render(
        result=result,
        methods=methods,
        means=means,
        comparisons=[
            f"{wording.difference_text(means[result.method] - mean)} {method}"
            for method, mean in means.items()
            if method != result.method
        ],
        mean_bytes=fmean(method.bytes for method in kept),
        mean_bits=fmean(method.bits_per_weight for method in kept),
        training_seconds=sum(method.seconds for method in kept),
        share=wording.share_text,
        light=palette.variables("light"),
        dark=palette.variables("dark"),
        drawn=_draw(result),
    )


def _methods(result: DemoResult) -> list[str]:
    """The kept method, then those it is compared with, in order of appearance."""
    others = [r.method for domain in result.domains for r in domain.methods]
    return list(dict.fromkeys([result.method, *others]))


def _with_methods_in_order(result: DemoResult, methods: list[str]) -> DemoResult:
    """The same result with every domain's methods in one order, so that colours agree."""
    domains = tuple(
        replace(d, methods=tuple(sorted(d.methods, key=lambda r: methods.index(r.method)))) for d in result.domains
    )
    return replace(result, domains=domains)


def _mean_accuracies(result: DemoResult, methods: list[str]) -> dict[str, float]:
    """Mean test accuracy of the methods that were tried on every domain."""
    means = {}
    for method in methods:
        found = [r for domain in result.domains if (r := domain.result_of(method))]
        if len(found) == len(result.domains):
            means[method] = fmean(r.test_accuracy for r in found)
    return means


@dataclass(frozen=True)
class _Drawn:
    """The page's figures as SVG; empty where there is nothing to draw."""

    curves: list[tuple[str, str]]  # a domain's title, its figure
    size: str
    bits: str
    density: str
    scalars: list[tuple[str, str]]  # a domain's title, its figure


def _draw(result: DemoResult) -> _Drawn:
    domains = result.domains
    layers = {domain.title: domain.layers for domain in domains if domain.layers}
    bits = {domain.title: domain.components for domain in domains if domain.components}
    limit = figures.largest_scalar(layer for stack in layers.values() for layer in stack)
    return _Drawn(
        curves=[
            (domain.title, figures.learning_curves(domain.methods, name=f"curves-{i}"))
            for i, domain in enumerate(domains)
        ],
        size=figures.size_against_accuracy(domains, name="size"),
        bits=figures.bits_by_component(bits, name="bits") if bits else "",
        density=figures.density_by_depth(layers, name="density") if layers else "",
        scalars=[
            (title, figures.scalars_by_depth(stack, name=f"scalars-{i}", limit=limit))
            for i, (title, stack) in enumerate(layers.items())
        ],
    )


def _data_uri(image: bytes) -> str:
    kind = "jpeg" if image.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
