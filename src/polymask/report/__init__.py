"""Reports: figures, and one self-contained HTML file."""

from polymask.report.demo_page import demo_page, write_demo_report
from polymask.report.figures import (
    bits_by_component,
    density_by_depth,
    largest_scalar,
    learning_curves,
    scalars_by_depth,
    size_against_accuracy,
)
from polymask.report.results import (
    DemoResult,
    DomainResult,
    EpochPoint,
    LayerStatistics,
    MethodResult,
    Prediction,
    layer_statistics,
)

__all__ = [
    "DemoResult",
    "DomainResult",
    "EpochPoint",
    "LayerStatistics",
    "MethodResult",
    "Prediction",
    "bits_by_component",
    "demo_page",
    "density_by_depth",
    "largest_scalar",
    "layer_statistics",
    "learning_curves",
    "scalars_by_depth",
    "size_against_accuracy",
    "write_demo_report",
]
