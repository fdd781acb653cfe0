"""The demo's report: one HTML file that needs nothing else to be read."""

import base64
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from polymask.files import write_atomically
from polymask.report import canvas as palette
from polymask.report import figures
from polymask.report import sheet as wording
from polymask.report.results import DemoResult

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
