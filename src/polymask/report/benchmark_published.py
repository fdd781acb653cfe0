"""Tables with what others published: the paper's rows, and its ablation beside ours."""

from collections.abc import Mapping, Sequence

from polymask.benchmarks.anatomy import FULL
from polymask.benchmarks.beside import Ablation, Beside
from polymask.benchmarks.compare import compare_rows
from polymask.benchmarks.naming import label_of
from polymask.benchmarks.published import PublishedRow
from polymask.benchmarks.tables import ResultTable, Row, Statistic
from polymask.report.benchmark_results import marked, moved_cell, number, over_seeds, still_note
from polymask.report.sheet import Cell, Column, Line, Sheet

PUBLISHED = "published"


def published_sheet(beside: Beside) -> Sheet:
    """The published rows, the domains that the runs have too in bold."""
    table, some = beside.table, bool(beside.shared_scores)
    domains = tuple(next(iter(table.rows.values())).accuracy)
    accuracy = "test accuracy, %"
    columns = [Column("#Params")]
    columns += [Column(domain, accuracy, strong=some and domain in beside.shared) for domain in domains]
    columns += [Column("Score"), Column("Score / #Params")]
    columns += [Column("Score, in common", strong=True)] if some else []
    lines = []
    for system, row in table.rows.items():
        cells = [Cell(f"{row.params:g}")]
        cells += [
            Cell(f"{value:.{table.decimals}f}", strong=some and domain in beside.shared)
            for domain, value in row.accuracy.items()
        ]
        for cell, value in (("score", row.score), ("score_per_param", row.score_per_param)):
            cells.append(Cell(f"{value}{'†' if (system, cell) in beside.misprints else ''}"))
        cells += [number(beside.shared_scores[system], 0, strong=True)] if some else []
        lines.append(Line(_label(row), tuple(cells), row.method or ""))
    return Sheet(
        "published",
        f"{table.benchmark} on {table.base}",
        PUBLISHED,
        "system",
        tuple(columns),
        tuple(lines),
        tuple(_published_notes(beside)),
    )


def ablation_sheet(ablations: Sequence[Ablation], table: ResultTable) -> Sheet:
    """The twelve rows: which of k0 … k3 are learned, our accuracies, the published ones."""
    plan = table.plan
    here = f"measured here, {plan.base}"
    domains = list(plan.domains)
    published = {
        name: [domain for domain in domains if domain in accuracy] for name, accuracy in ablations[0].published.items()
    }
    several = len(domains) > 1
    columns = [Column(f"k{i}") for i in range(4)]
    columns += [Column(domain, here) for domain in domains]
    columns += [Column("mean", here)] if several else []
    masks = any(one.row is not None and one.row.moved is not None for one in ablations)
    columns += [Column("bits moved", here)] if masks else []
    full = table.row(FULL)
    columns += [Column("more than Full, points", here)] if full is not None else []
    columns += [Column(domain, f"published, {name}") for name, shared in published.items() for domain in shared]
    lines = []
    for one in ablations:
        ours: Mapping[str, Statistic | None] = {} if one.row is None else one.row.accuracy
        cells = [Cell("✓" if k == "learned" else f"{k:g}") for k in one.k]
        still = () if one.row is None else one.row.still
        found = {domain: over_seeds(ours.get(domain), 1, len(plan.seeds)) for domain in domains}
        cells += [marked(cell) if domain in still else cell for domain, cell in found.items()]
        mean = number(None if one.row is None else one.row.mean, 1)
        cells += [marked(mean) if still else mean] if several else []
        cells += [Cell() if one.row is None else moved_cell(one.row)] if masks else []
        cells += [_more_than(full, one.row)] if full is not None else []
        cells += [number(one.published[name][domain], 1) for name, shared in published.items() for domain in shared]
        remark = "" if one.row is None else one.row.remark
        lines.append(Line(one.label, tuple(cells), one.method, remark))
    notes = ["✓: learned. A number: fixed to it.", *still_note(one.row for one in ablations)]
    if full is not None:
        notes.append(
            "More than Full: paired by domain and seed, as under Who is ahead of whom; ± is a 95 % "
            "interval, and where it holds 0 the two cannot be told apart."
        )
    if not any(published.values()):
        notes.append("The paper's ablation has none of these domains.")
    return Sheet(
        "ablation",
        "Ablation: what each part of the affine mask is worth",
        "",
        "method",
        tuple(columns),
        tuple(lines),
        tuple(notes),
    )


def _more_than(full: Row, row: Row | None) -> Cell:
    """The paired difference; nothing from rows whose masks did not move."""
    if row is None or row is full:
        return Cell()
    found = compare_rows(row, full)
    return Cell(found.difference, found.interval) if found.mean is not None else Cell()


def _label(row: PublishedRow) -> str:
    """The printed name; what the paper calls ours is not ours."""
    if row.method is None or "ours" not in row.label.lower():
        return row.label
    return f"{label_of(row.method)}, the paper's own"


def _published_notes(beside: Beside) -> list[str]:
    notes = [beside.remark]
    if beside.shared_scores:
        among = ", ".join(beside.shared)
        networks = "printed individual" if beside.table.reference else "organisers'"
        notes.append(
            f"Bold: the domains that the runs above have too ({among}). The last column scores the "
            f"printed accuracies on those alone, against the {networks} networks."
        )
    elif not beside.shared:
        notes.append("The runs above have none of these domains.")
    wrong = []
    for (system, cell), value in beside.misprints.items():
        column = {"score": "Score"}.get(cell, "Score / #Params")
        wrong.append(f"{_label(beside.table.rows[system])}, {column}: {value:.0f}")
    if wrong:
        notes.append(f"† as printed; the printed accuracies give {'; '.join(wrong)}.")
    return notes
