import io
from dataclasses import replace

import pytest
from PIL import Image

from polymask.benchmarks.records import EpochPoint, LayerStatistics
from polymask.report.demo_page import DemoResult, DomainResult, ExampleImage, MethodResult


def _picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "teal").save(file, kind)
    return file.getvalue()


def _method(name: str, accuracy: float, size: int, bits: float) -> MethodResult:
    curve = tuple(EpochPoint(e, 2.0 / e, accuracy - 10 / e) for e in (1, 2, 3))
    return MethodResult(name, accuracy, size, bits, 61.4, curve)


def _domain(name: str, title: str, accuracy: float) -> DomainResult:
    layers = tuple(
        LayerStatistics(f"block.{d}.weight", "conv", d, 9 * (d + 1), 0.5 + 0.01 * d, d, -d, 0.1) for d in range(5)
    )
    return DomainResult(
        name=name,
        title=title,
        classes=3,
        train_images=1200,
        test_images=300,
        # Not in the page's order, which begins with the kept method.
        methods=(
            _method("classifier-only", accuracy - 25, 50_000, 0.0),
            _method("affine-full", accuracy, 640_000, 1.31),
            _method("finetune", accuracy + 0.5, 13_600_000, 32.0),
        ),
        predictions=(
            ExampleImage(_picture("PNG"), "seven", (("seven", 0.9), ("one", 0.1))),
            ExampleImage(_picture("JPEG"), "two", (("three", 0.6), ("two", 0.3), ("one", 0.1))),
        ),
        layers=layers,
        unchanged=True,
        components={"mask": 3_000_000, "norm_affine": 900_000, "bias": 0, "head": 40_000},
    )


@pytest.fixture(scope="session")
def result() -> DemoResult:
    domains = (_domain("digits", "Digits", 97.0), _domain("letters", "Letters", 91.0))
    return DemoResult(
        base="EfficientNet-Lite0",
        base_parameters=4_652_008,
        base_bytes=18_700_000,
        fingerprint_before="ab" * 32,
        fingerprint_after="ab" * 32,
        domains=domains,
        seconds=412.7,
        settings={"recipe": "quick", "seed": "0"},
        environment={"torch": "2.13.0"},
    )


@pytest.fixture(scope="session")
def broken(result: DemoResult) -> DemoResult:
    """The same run, but its second domain does not give what it gave."""
    first, second = result.domains
    return replace(result, domains=(first, replace(second, unchanged=False)))


@pytest.fixture(scope="session")
def hostile(result: DemoResult) -> DemoResult:
    """Names that would be markup, formulas or broken XML if they were not escaped."""
    name = "</svg><script>alert('x')</script>&$\\frac{\x00漢\""
    prediction = ExampleImage(_picture("PNG"), name, ((name, 1.0),))
    domain = replace(result.domains[0], name=name, title=name, predictions=(prediction,), components={name: 8})
    methods = (*domain.methods, replace(domain.methods[0], method=name))
    return replace(
        result,
        base=name,
        domains=(replace(domain, methods=methods), result.domains[1]),
        settings={name: name},
        environment={name: name},
        command=name,
    )
