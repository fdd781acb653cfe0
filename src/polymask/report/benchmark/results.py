"""Tables of what the runs measured: accuracies and scores, and what they cost."""

from collections.abc import Sequence
from itertools import chain

from polymask.benchmarks.frontier import Frontier
from polymask.benchmarks.tables import ResultTable, Row, Statistic
from polymask.report.benchmark.sheet import NOTHING, Cell, Column, Line, Sheet
from polymask.report.wording import bytes_text, duration_text

HERE = "measured here"


def results_sheet(table: ResultTable) -> Sheet:
    """The layout of the paper: #Params, accuracy on each domain, Score, Score/#Params."""
    plan, scored = table.plan, table.reference.benchmark is not None
    averaged = not scored and len(plan.domains) > 1
    by_seed = any(row.score_by_seed for row in table.rows)
    accuracy = "test accuracy, %"
    columns = [Column("#Params"), *(Column(domain, accuracy) for domain in table.columns)]
    if scored:
        columns.append(Column("Score"))
        columns += [Column("Score by seed")] if by_seed else []
        columns.append(Column("Score / #Params"))
    columns += [Column("mean", accuracy)] if averaged else []
    best = _best(table.rows, tuple(plan.domains), _places(table))
    lines = []
    for row in table.rows:
        cells = [number(row.params, 2)]
        for column in table.columns:
            own = column == table.own and not row.moves_base
            cells.append(
                over_seeds(row.accuracy[column], _places(table), None if own else len(plan.seeds))
            )
        if scored:
            cells.append(number(None if row.score is None else row.score.score, 0))
            cells += [over_seeds(row.score_by_seed, 0, len(plan.seeds))] if by_seed else []
            cells.append(number(row.score_per_param, 0))
        cells += [number(row.mean, _places(table))] if averaged else []
        strong = best.get(row.label, set())
        named = zip(columns, cells, strict=True)
        cells = [Cell(c.text, c.after, column.title in strong) for column, c in named]
        lines.append(Line(row.label, tuple(cells), row.method))
    return Sheet(
        "results",
        f"{plan.benchmark} on {plan.base}",
        HERE,
        "method",
        tuple(columns),
        tuple(lines),
        tuple(_result_notes(table)),
    )


def validation_sheet(table: ResultTable) -> Sheet | None:
    """Accuracies on validation, where test images without labels leave nothing else."""
    plan = table.plan
    unlabelled = [name for name, facts in plan.domains.items() if facts.test is None]
    if not unlabelled:
        return None
    lines = []
    for row in table.rows:
        found = {
            domain: [
                value
                for outcome in row.outcomes
                if domain in outcome.domains
                and (value := outcome.domains[domain].val_accuracy) is not None
            ]
            for domain in unlabelled
        }
        cells = (number(sum(v) / len(v), _places(table)) if v else Cell() for v in found.values())
        lines.append(Line(row.label, tuple(cells), row.method))
    return Sheet(
        "validation",
        "Accuracy on validation, where test images have no labels here",
        HERE,
        "method",
        tuple(Column(domain, "validation accuracy, %") for domain in unlabelled),
        tuple(lines),
        ("Not test accuracies. Score a submission with `polymask score` to get those.",),
    )


def cost_sheet(table: ResultTable, frontier: Frontier) -> Sheet:
    """What each method stores and how long it trains, smallest first."""
    members = {point.label for point in frontier.members}
    domains = len(table.plan.domains)
    columns = (
        Column("frontier"),
        Column(frontier.measure),
        Column("paper's", "#Params"),
        Column("as stored", "#Params"),
        Column("bits a weight", "a domain adds"),
        Column("pack", "a domain adds"),
        Column("training, all domains"),
    )
    scored = frontier.measure == "score"
    rows = sorted(table.rows, key=lambda row: (row.params is None, row.params or 0.0))
    lines = []
    for row in rows:
        value = (row.score.score if row.score else None) if scored else row.mean
        cells = (
            Cell("●" if row.label in members else ""),
            number(value, 0 if scored else 1),
            number(row.params, 3),
            number(row.params_stored, 3),
            number(row.overhead(domains), 2),
            Cell() if row.pack_bytes is None else Cell(bytes_text(row.pack_bytes)),
            Cell() if row.seconds is None else Cell(duration_text(row.seconds)),
        )
        lines.append(Line(row.label, cells, row.method))
    note = (
        "#Params and the bits are what must be kept for all domains, heads aside. A pack is the "
        "file of one domain, head and all; methods that move the base keep there what they moved."
    )
    return Sheet("costs", "What each method costs", HERE, "method", columns, tuple(lines), (note,))


def number(value: float | None, places: int, *, strong: bool = False) -> Cell:
    """A number with so many decimals, or nothing."""
    return Cell() if value is None else Cell(f"{value:.{places}f}", strong=strong)


def over_seeds(one: Statistic | None, places: int, planned: int | None) -> Cell:
    """A mean with its deviation, and the number of seeds where it is not what was planned."""
    if one is None:
        return Cell()
    after = [] if one.sd is None or planned is None else [f"± {one.sd:.{places}f}"]
    after += [f"({one.n})"] if planned is not None and one.n < planned else []
    return Cell(f"{one.mean:.{places}f}", " ".join(after))


def _places(table: ResultTable) -> int:
    """The decathlon's score asks for two decimals, docs/score.md."""
    return 2 if table.plan.benchmark == "decathlon" else 1


def _best(rows: Sequence[Row], columns: Sequence[str], places: int) -> dict[str, set[str]]:
    """Which columns each row is the best in, individual networks aside."""
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.method.partition(":")[0] == "finetune":
            continue
        for column in columns:
            if (one := row.accuracy[column]) is not None:
                values.setdefault(column, {})[row.label] = round(one.mean, places)
        if row.score is not None:
            values.setdefault("Score", {})[row.label] = round(row.score.score)
        if row.score_per_param is not None:
            values.setdefault("Score / #Params", {})[row.label] = round(row.score_per_param)
    found: dict[str, set[str]] = {}
    for column, by_row in values.items():
        if len(set(by_row.values())) > 1:
            for label in (label for label, v in by_row.items() if v == max(by_row.values())):
                found.setdefault(label, set()).add(column)
    return found


def _result_notes(table: ResultTable) -> list[str]:
    plan, seeds = table.plan, len(table.plan.seeds)
    notes = [table.reference.remark]
    if table.own is not None:
        notes.append(
            f"{table.own} is the base's own domain: {plan.own_accuracy:.1f} % with its own "
            "classifier, which methods that leave the base alone keep; others show what is left."
        )
    statistics = chain.from_iterable(row.accuracy.values() for row in table.rows)
    if seeds > 1:
        notes.append(
            f"Mean ± standard deviation over {seeds} seeds. Score is that of the mean accuracies; "
            "by seed, each seed is scored alone."
        )
        if any(one is not None and one.n < seeds for one in statistics):
            notes.append("(n): seeds that are done, where some are not.")
    else:
        notes.append("One seed: nothing is known of the spread.")
    notes.append("Bold: the best of its column, individual networks aside.")
    if table.missing:
        notes.append(f"{NOTHING}: not done. Missing: {'; '.join(table.missing)}.")
    if table.left_out:
        notes.append(
            f"{table.left_out} results in the folder are of methods or seeds that its plan does "
            "not name; they are left out."
        )
    return notes
