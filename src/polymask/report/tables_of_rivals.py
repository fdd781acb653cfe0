"""Tables that compare: with what others published, and who is ahead of whom."""

from collections.abc import Mapping, Sequence

from polymask.benchmarks.compare import Comparison, compare_rows
from polymask.benchmarks.findings import FULL
from polymask.benchmarks.published import Ablation, PublishedMatch, PublishedRow
from polymask.benchmarks.records import label_of
from polymask.benchmarks.tables import ResultRow, ResultTable, Statistic
from polymask.report.sheet import NOTHING, Cell, Column, Line, Sheet
from polymask.report.tables_of_results import HERE, marked, moved_cell, number, over_seeds, still_note

PUBLISHED = "published"


def published_sheet(beside: PublishedMatch) -> Sheet:
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


def _more_than(full: ResultRow, row: ResultRow | None) -> Cell:
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


def _published_notes(beside: PublishedMatch) -> list[str]:
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


def comparison_sheet(name: str, comparisons: Sequence[Comparison]) -> Sheet | None:
    """Every row against one method."""
    if not comparisons:
        return None
    columns = (Column("points more"), Column("ahead on"), Column("seeds"), Column("p"), Column("so it is", words=True))
    lines = []
    for one in comparisons:
        if one.mean is None:
            lines.append(Line(one.method, (Cell(), Cell(), Cell(), Cell(), Cell(_why(one)))))
            continue
        least, most = one.seeds
        cells = (
            Cell(one.difference, one.interval),
            Cell(f"{one.ahead} of {len(one.by_domain)}"),
            Cell(f"{most}" if least == most else f"{least} to {most}"),
            Cell() if one.p is None else Cell(f"{one.p:.2g}"),
            Cell(_words(one)),
        )
        lines.append(Line(one.method, cells))
    other = comparisons[0].other
    return Sheet(f"ahead-{name}", f"Against {other}", HERE, "method", columns, tuple(lines), tuple(_notes(comparisons)))


def _words(one: Comparison) -> str:
    if not one.left_out:
        return one.verdict
    return f"{one.verdict}; without {', '.join(one.left_out)}, where masks did not move"


def _why(one: Comparison) -> str:
    return one.sentence.partition(": ")[2]


def _notes(comparisons: Sequence[Comparison]) -> list[str]:
    notes = [
        "Points of test accuracy that a row has more, paired by domain and seed: the mean over a "
        "domain's seeds, then over domains."
    ]
    over = {one.over for one in comparisons if one.mean is not None}
    if "domains" in over:
        notes.append(
            "± is half of the 95 % t interval over domains. Where it holds 0, the two cannot be "
            "told apart. p: were neither ahead, so often would the mean be as far from 0, over all "
            "choices of the domains' signs; with n domains never below 2 / 2ⁿ."
        )
    if "seeds" in over:
        notes.append(
            "With fewer than three domains ± and p are over seeds, and speak of these domains "
            "alone: another domain may say otherwise."
        )
    if "" in over:
        notes.append(f"Without ±, or with {NOTHING} for p: too few domains and seeds for an interval.")
    told = sum(one.half_width is not None for one in comparisons)
    if told > 1:
        notes.append(
            f"{told} comparisons at 95 % each: were there no differences at all, one in twenty "
            "would still be called one."
        )
    return notes
