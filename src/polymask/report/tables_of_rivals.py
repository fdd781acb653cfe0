"""Tables that compare: with what others published, and who is ahead of whom."""

from collections.abc import Mapping, Sequence

from polymask.benchmarks.compare import Comparison, compare_rows
from polymask.benchmarks.findings import FULL
from polymask.benchmarks.published import Ablation, PublishedMatch, PublishedRow
from polymask.benchmarks.records import label_of
from polymask.benchmarks.tables import ResultRow, ResultTable, Statistic
from polymask.report.page_parts import NOTHING, Cell, Heading, PageRow, PageTable
from polymask.report.tables_of_results import HERE, marked, moved_cell, number, over_seeds, still_note

PUBLISHED = "published"


def published_table(match: PublishedMatch) -> PageTable:
    """The published rows, the domains that the runs have too in bold."""
    table, some = match.table, bool(match.shared_scores)
    strong = set(match.shared) if some else set()
    domains = tuple(next(iter(table.rows.values())).accuracy)
    headings = [Heading("#Params"), *(Heading(d, "test accuracy, %", strong=d in strong) for d in domains)]
    headings += [Heading("Score"), Heading("Score / #Params")]
    headings += [Heading("Score, in common", strong=True)] if some else []
    rows = []
    for system, row in table.rows.items():
        cells = [Cell(f"{row.params:g}")]
        cells += [number(value, table.decimals, strong=domain in strong) for domain, value in row.accuracy.items()]
        for cell, value in (("score", row.score), ("score_per_param", row.score_per_param)):
            cells.append(Cell(f"{value}{'†' if (system, cell) in match.misprints else ''}"))
        cells += [number(match.shared_scores[system], 0, strong=True)] if some else []
        rows.append(PageRow(_label(row), cells, row.method or ""))
    title = f"{table.benchmark} on {table.base}"
    return PageTable("published", title, PUBLISHED, "system", headings, rows, _published_notes(match))


def _published_notes(match: PublishedMatch) -> list[str]:
    notes = [match.remark]
    if match.shared_scores:
        networks = "printed individual" if match.table.reference else "organisers'"
        notes.append(
            f"Bold: the domains that the runs above have too ({', '.join(match.shared)}). The last column scores the "
            f"printed accuracies on those alone, against the {networks} networks."
        )
    elif not match.shared:
        notes.append("The runs above do not have these domains.")
    wrong = []
    for (system, cell), value in match.misprints.items():
        column = {"score": "Score"}.get(cell, "Score / #Params")
        wrong.append(f"{_label(match.table.rows[system])}, {column}: {value:.0f}")
    if wrong:
        notes.append(f"† as printed; the printed accuracies give {'; '.join(wrong)}.")
    return notes


def _label(row: PublishedRow) -> str:
    """The printed name; what the paper calls ours is not ours."""
    if row.method is None or "ours" not in row.label.lower():
        return row.label
    return f"{label_of(row.method)}, the paper's own"


def ablation_table(ablations: Sequence[Ablation], table: ResultTable) -> PageTable:
    """The twelve rows: which of k0 … k3 are learned, our accuracies, the published ones."""
    plan = table.plan
    here, domains = f"measured here, {plan.base}", list(plan.domains)
    printed = [
        (name, domain) for name, accuracy in ablations[0].published.items() for domain in domains if domain in accuracy
    ]
    several = len(domains) > 1
    masks = any(one.row is not None and one.row.moved is not None for one in ablations)
    full = table.row(FULL)
    headings = [Heading(f"k{i}") for i in range(4)]
    headings += [Heading(domain, here) for domain in domains]
    headings += [Heading("mean", here)] if several else []
    headings += [Heading("bits moved", here)] if masks else []
    headings += [Heading("more than Full, points", here)] if full is not None else []
    headings += [Heading(domain, f"published, {name}") for name, domain in printed]
    rows = []
    for one in ablations:
        row = one.row
        ours: Mapping[str, Statistic | None] = {} if row is None else row.accuracy
        still = () if row is None else row.still
        cells = [Cell("✓" if k == "learned" else f"{k:g}") for k in one.k]
        found = {domain: over_seeds(ours.get(domain), 1, len(plan.seeds)) for domain in domains}
        cells += [marked(cell) if domain in still else cell for domain, cell in found.items()]
        mean = number(None if row is None else row.mean, 1)
        cells += [marked(mean) if still else mean] if several else []
        cells += [moved_cell(row)] if masks else []
        cells += [_more_than(full, row)] if full is not None else []
        cells += [number(one.published[name][domain], 1) for name, domain in printed]
        rows.append(PageRow(one.label, cells, one.method, "" if row is None else row.remark))
    notes = ["✓: learned. A number: fixed to it.", *still_note(one.row for one in ablations)]
    if full is not None:
        notes.append(
            "More than Full: paired by domain and seed, as under Who is ahead of whom; ± is a 95 % interval, and "
            "where it holds 0 the two cannot be told apart."
        )
    if not printed:
        notes.append("The paper's ablation does not have these domains.")
    title = "Ablation: what each part of the affine mask is worth"
    return PageTable("ablation", title, "", "method", headings, rows, notes)


def _more_than(full: ResultRow, row: ResultRow | None) -> Cell:
    """The paired difference; nothing from rows whose masks did not move."""
    if row is None or row is full:
        return Cell()
    found = compare_rows(row, full)
    return Cell(found.difference, found.interval) if found.mean is not None else Cell()


def comparison_table(name: str, comparisons: Sequence[Comparison]) -> PageTable | None:
    """Every row against one method."""
    if not comparisons:
        return None
    headings = [Heading(title) for title in ("points more", "ahead on", "seeds", "p")]
    headings.append(Heading("so it is", words=True))
    rows = []
    for one in comparisons:
        if one.mean is None:
            why = one.sentence.partition(": ")[2]
            rows.append(PageRow(one.method, [*[Cell()] * 4, Cell(why)]))
            continue
        least, most = one.seeds
        without = f"; without {', '.join(one.left_out)}, where masks did not move" if one.left_out else ""
        cells = [
            Cell(one.difference, one.interval),
            Cell(f"{one.ahead} of {len(one.by_domain)}"),
            Cell(f"{most}" if least == most else f"{least} to {most}"),
            Cell() if one.p is None else Cell(f"{one.p:.2g}"),
            Cell(f"{one.verdict}{without}"),
        ]
        rows.append(PageRow(one.method, cells))
    title = f"Against {comparisons[0].other}"
    return PageTable(f"ahead-{name}", title, HERE, "method", headings, rows, _comparison_notes(comparisons))


def _comparison_notes(comparisons: Sequence[Comparison]) -> list[str]:
    notes = [
        "Points of test accuracy that a row has more, paired by domain and seed: the mean over a domain's seeds, then "
        "over domains."
    ]
    over = {one.over for one in comparisons if one.mean is not None}
    if "domains" in over:
        notes.append(
            "± is half of the 95 % t interval over domains. Where it holds 0, the two cannot be told apart. p: if "
            "neither were ahead, how often the mean would be as far from 0, over all choices of the domains' signs; "
            "with n domains never below 2 / 2ⁿ."
        )
    if "seeds" in over:
        notes.append(
            "With fewer than three domains ± and p are over seeds, and hold for these domains alone: another domain "
            "may say otherwise."
        )
    if "" in over:
        notes.append(f"Without ±, or with {NOTHING} for p: too few domains and seeds for an interval.")
    told = sum(one.half_width is not None for one in comparisons)
    if told > 1:
        notes.append(
            f"{told} comparisons at 95 % each: even without any differences, one in twenty would be called one."
        )
    return notes
