"""What masks and scalars look like by layer: the parameter analysis of the paper.

Only of masks that moved: the others look as they were made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from polymask.benchmarks.tables import ResultTable, Row
from polymask.report.results import LayerStatistics

FULL = "affine-full"
PAPERS_PIGGYBACK = "piggyback-star-bn"
_PIGGYBACKS = (PAPERS_PIGGYBACK, "piggyback-bn", "piggyback-star", "piggyback")  # nearest first


@dataclass(frozen=True)
class Anatomy:
    """One domain of one method, from its first seed: shares in percent, scalars as they are."""

    method: str
    label: str
    domain: str
    layers: tuple[LayerStatistics, ...]

    @property
    def ones(self) -> float:
        """The share of ones over all weights."""
        total = sum(layer.weights for layer in self.layers)
        return 100 * sum(layer.density * layer.weights for layer in self.layers) / total

    @property
    def early_ones(self) -> float:
        """The mean share of ones in the first third of the layers."""
        return 100 * fmean(layer.density for layer in self.layers[: self._third])

    @property
    def late_ones(self) -> float:
        """The mean share of ones in the last third of the layers."""
        return 100 * fmean(layer.density for layer in self.layers[-self._third :])

    @property
    def opposite(self) -> float:
        """The share of layers whose k1 and k2 have opposite signs."""
        return 100 * fmean(layer.k1 * layer.k2 < 0 for layer in self.layers)

    def magnitude(self, k: str) -> float:
        """The median over layers of |k1|, |k2| or |k3|."""
        return median(self._sizes(k))

    def growth(self, k: str) -> float:
        """The last third's mean magnitude over the first third's; 0 where that is 0."""
        sizes = self._sizes(k)
        early, late = fmean(sizes[: self._third]), fmean(sizes[-self._third :])
        return late / early if early else 0.0

    def _sizes(self, k: str) -> list[float]:
        return [abs(float(getattr(layer, k))) for layer in self.layers]

    @property
    def _third(self) -> int:
        return max(1, len(self.layers) // 3)


def find_anatomies(table: ResultTable) -> tuple[Anatomy, ...]:
    """The Piggyback of the paper's figures, or what comes nearest, and the full model, by domain.

    That is the paper's own implementation, with own norms: "Piggyback* with BN" in its ablation.
    """
    present = {row.method for row in table.rows if len(row.still) < _domains_with_masks(row)}
    chosen = [method for method in _PIGGYBACKS if method in present][:1]
    rows = [table.row(method) for method in (*chosen, FULL)]
    return tuple(
        anatomy
        for row in rows
        if row is not None
        for domain in table.plan.domains
        if (anatomy := _anatomy(row, domain)) is not None
    )


def find_unmoved(table: ResultTable) -> dict[str, tuple[str, ...]]:
    """By label, the domains of Piggyback and the full model whose masks did not move."""
    rows = [table.row(method) for method in (*_PIGGYBACKS, FULL)]
    return {row.label: row.still for row in rows if row is not None and row.still}


def _domains_with_masks(row: Row) -> int:
    return sum(any(one.layers for one in row.found_on(name).values()) for name in row.values)


def which_piggyback(anatomies: Sequence[Anatomy]) -> str:
    """A sentence on whether the Piggyback that is shown is that of the paper's figures."""
    shown = next((one for one in anatomies if one.method != FULL), None)
    papers = "that of the paper’s Figures 3 and 4, its own implementation with own norms"
    if shown is None:
        return f"Piggyback was not run; {PAPERS_PIGGYBACK} is {papers}."
    if shown.method == PAPERS_PIGGYBACK:
        return f"Piggyback ({shown.method}) is {papers}."
    return f"Piggyback is {shown.method} here; {PAPERS_PIGGYBACK}, {papers}, was not run."


def _anatomy(row: Row, domain: str) -> Anatomy | None:
    found = row.found_on(domain)
    if not found or not found[min(found)].layers or domain in row.still:
        return None
    return Anatomy(row.method, row.label, domain, found[min(found)].layers)
