"""Tables of what the runs measured: accuracies and scores, and what they cost."""

from collections.abc import Iterable, Sequence
from itertools import chain

from polymask.benchmarks.compare import Frontier
from polymask.benchmarks.records import LEAST_MOVED
from polymask.benchmarks.tables import ResultRow, ResultTable, Statistic, protocol_of, settings_text
from polymask.report.sheet import NOTHING, Cell, Column, Line, Sheet, bytes_text, duration_text, listed, moved_text
from polymask.train.recipe import write_value

HERE = "measured here"
STILL = "‡"  # after an accuracy: the masks behind it did not move


def results_sheet(table: ResultTable) -> Sheet:
    """The layout of the paper: #Params, accuracy on each domain, Score, Score/#Params."""
    plan, scored = table.plan, table.reference.benchmark is not None
    averaged = not scored and len(plan.domains) > 1
    by_seed = any(row.score_by_seed for row in table.rows)
    accuracy = "test accuracy, %"
    columns = [Column("#Params"), *(Column(domain, accuracy) for domain in table.columns)]
    columns += [Column("mean", accuracy)] if averaged else []
    if scored:
        columns.append(Column("Score"))
        columns += [Column("Score by seed")] if by_seed else []
        columns.append(Column("Score / #Params"))
    columns.append(Column("bits moved"))
    best = _best(table.rows, tuple(plan.domains), _places(table))
    lines = []
    for row in table.rows:
        cells = [number(row.params, 2)]
        for column in table.columns:
            own = column == table.own and not row.moves_base
            cell = over_seeds(row.accuracy[column], _places(table), None if own else len(plan.seeds))
            cells.append(marked(cell) if column in row.still else cell)
        cells += [_mean_cell(row, table)] if averaged else []
        if scored:
            scores = [number(None if row.score is None else row.score.score, 0)]
            scores += [over_seeds(row.score_by_seed, 0, len(plan.seeds))] if by_seed else []
            scores.append(number(row.score_per_param, 0))
            cells += [marked(cell) for cell in scores] if row.still else scores
        cells.append(moved_cell(row))
        strong = best.get(row.label, set())
        named = zip(columns, cells, strict=True)
        cells = [Cell(c.text, c.after, column.title in strong) for column, c in named]
        lines.append(Line(row.label, tuple(cells), row.method, row.remark))
    return Sheet(
        "results",
        f"{plan.benchmark} on {plan.base}",
        HERE,
        "method",
        tuple(columns),
        tuple(lines),
        tuple(_result_notes(table)),
    )


def rows_sheet(table: ResultTable) -> Sheet:
    """What stands behind a row's accuracies: seeds, masks that moved, fields that were chosen."""
    plan = table.plan
    fields = list(dict.fromkeys(name for tuned in plan.tuning.values() for name in tuned.fields))
    protocols = {row.method: protocol_of(plan, row) for row in table.rows}
    others = any(set(found) - set(fields) for found in protocols.values())
    columns = [Column("mean test accuracy, %"), Column("seeds"), Column("bits moved")]
    columns += [Column(name, "chosen on validation") for name in fields]
    columns += [Column("else not as in the plan", words=True)] if others else []
    lines = []
    for row in table.rows:
        chosen, found = plan.chosen(row.method), protocols[row.method]
        cells = [_mean_cell(row, table), Cell(str(len(row.seeds))), moved_cell(row)]
        cells += [Cell(write_value(chosen[n])) if n in chosen else Cell() for n in fields]
        rest = {name: value for name, value in found.items() if name not in chosen}
        cells += [Cell(settings_text(rest))] if others else []
        lines.append(Line(row.label, tuple(cells), row.method, row.remark))
    notes = ["Mean over domains, then ± the standard deviation over seeds that have them all."]
    return Sheet(
        "rows",
        "Behind each row",
        HERE,
        "method",
        tuple(columns),
        tuple(lines),
        (*notes, *_moved_note(table), *still_note(table.rows)),
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
                if domain in outcome.domains and (value := outcome.domains[domain].val_accuracy) is not None
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
    places, lines = 0 if scored else 1, []
    for row in rows:
        value = (row.score.score if row.score else None) if scored else row.mean
        cells = (
            Cell("●" if row.label in members else ""),
            marked(number(value, places)) if row.still else number(value, places),
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
    notes = (note, *still_note(rows))
    return Sheet("costs", "What each method costs", HERE, "method", columns, tuple(lines), notes)


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


def marked(cell: Cell) -> Cell:
    """What a row reached whose masks did not move there."""
    return cell if cell.text == NOTHING else Cell(cell.text, f"{STILL} {cell.after}".strip(), cell.strong)


def moved_cell(row: ResultRow) -> Cell:
    """The share of its masks' bits that moved; nothing where it has no masks."""
    return Cell() if row.moved is None else Cell(moved_text(row.moved.share))


def still_note(rows: Iterable[ResultRow | None]) -> list[str]:
    """What the mark means, where a row has it."""
    if not any(row is not None and row.still for row in rows):
        return []
    return [
        f"{STILL} Fewer than {100 * LEAST_MOVED:g} % of the bits of its masks moved: what it "
        "reached there is its norms' and its head's, and nothing is concluded from it."
    ]


def _moved_note(table: ResultTable) -> list[str]:
    uncounted = [
        row.label
        for row in table.rows
        if row.moved is None and any(d.layers for o in row.outcomes for d in o.domains.values())
    ]
    told = (
        f"Bits moved: the share of a row's mask bits that are not as they started; {NOTHING}: "
        "it has no masks that are learned"
    )
    if uncounted:
        told += f", or nobody counted ({listed(uncounted)})"
    return [f"{told}."]


def _mean_cell(row: ResultRow, table: ResultTable) -> Cell:
    """The mean over domains, with its deviation over seeds where they all have all domains."""
    places = _places(table)
    by_seed = row.mean_by_seed
    even = by_seed is not None and by_seed.n == len(row.seeds)
    cell = over_seeds(by_seed, places, len(table.plan.seeds)) if even else number(row.mean, places)
    return marked(cell) if row.still else cell


def _places(table: ResultTable) -> int:
    """The decathlon's score asks for two decimals, docs/score.md."""
    return 2 if table.plan.benchmark == "decathlon" else 1


def _best(rows: Sequence[ResultRow], columns: Sequence[str], places: int) -> dict[str, set[str]]:
    """Which columns each row is the best in, individual networks aside."""
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.method.partition(":")[0] == "finetune":
            continue
        for column in columns:
            one = row.accuracy[column]
            if one is not None and column not in row.still:
                values.setdefault(column, {})[row.label] = round(one.mean, places)
        if row.still:
            continue  # a score is over all domains
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
    notes += [*_moved_note(table), *still_note(table.rows)]
    if table.missing:
        notes.append(f"{NOTHING}: not done. Missing: {'; '.join(table.missing)}.")
    if table.left_out:
        notes.append(
            f"{table.left_out} results in the folder are of methods or seeds that its plan does "
            "not name; they are left out."
        )
    return notes
