"""Which figures a benchmark's report has, drawn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from polymask.benchmarks.anatomy import FULL, Anatomy, which_piggyback
from polymask.benchmarks.findings import Findings
from polymask.benchmarks.records import DomainOutcome
from polymask.benchmarks.tables import ResultTable, Row
from polymask.report.benchmark_differences import differences
from polymask.report.benchmark_figures import points_lost, size_against_score
from polymask.report.figures import (
    accuracy_and_loss,
    density_by_depth,
    largest_scalar,
    scalars_by_depth,
)
from polymask.report.results import EpochPoint

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
        densities=list(_densities(findings.anatomies)),
        densities_of=which_piggyback(findings.anatomies),
        scalars=list(_scalars(findings.anatomies)),
        curves=curves,
        curves_of=f"Accuracy on {images} images after each epoch, and the training loss during it",
        curves_without=sum(bool(row.outcomes) for row in table.rows) - len(chosen),
    )


def _ahead(findings: Findings) -> str:
    against = findings.comparisons.get("finetune", ())
    found = [one for one in against if one.mean is not None]
    return differences(found, name="ahead") if found else ""


def _densities(anatomies: Sequence[Anatomy]) -> Iterator[Titled]:
    by_method: dict[str, list[Anatomy]] = {}
    for one in anatomies:
        by_method.setdefault(one.label, []).append(one)
    for label, found in by_method.items():
        figures = -(-len(found) // _MOST_DENSITIES)
        each = -(-len(found) // figures)
        for start in range(0, len(found), each):
            stacks = {one.domain: one.layers for one in found[start : start + each]}
            name = f"density-{found[0].method}-{start}"
            yield label, density_by_depth(stacks, name=name)


def _scalars(anatomies: Sequence[Anatomy]) -> Iterator[Titled]:
    full = [one for one in anatomies if one.method == FULL]
    limit = largest_scalar(layer for one in full for layer in one.layers)
    for place, one in enumerate(full):
        yield one.domain, scalars_by_depth(one.layers, name=f"scalars-{place}", limit=limit)


def _chosen(rows: Sequence[Row]) -> list[Row]:
    """The methods that readers compare first, in the plan's order."""
    done = [row for row in rows if row.outcomes]
    rank = {method: place for place, method in enumerate(_CURVES_FIRST)}
    first = sorted(done, key=lambda row: rank.get(row.method, len(rank)))[:_MOST_CURVES]
    return [row for row in done if row in first]


def _curves(table: ResultTable, chosen: Sequence[Row], images: str) -> Iterator[Titled]:
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
