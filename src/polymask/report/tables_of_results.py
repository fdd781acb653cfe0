"""Tables of what the runs measured: accuracies and scores, and what they cost; and all of it as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from polymask.benchmarks.compare import Frontier
from polymask.benchmarks.records import LEAST_MOVED, movement
from polymask.benchmarks.tables import ResultRow, ResultTable, Statistic, protocol_of, settings_text
from polymask.report.page_parts import (
    NOTHING,
    Cell,
    Heading,
    PageRow,
    PageTable,
    bytes_text,
    duration_text,
    listed,
    moved_text,
)
from polymask.train.recipe import write_value

HERE = "measured here"
STILL = "‡"  # after an accuracy: the masks behind it did not move


def results_table(table: ResultTable) -> PageTable:
    """The layout of the paper: #Params, accuracy on each domain, Score, Score/#Params."""
    plan, scored, places = table.plan, table.reference.benchmark is not None, _places(table)
    averaged = not scored and len(plan.domains) > 1
    by_seed = any(row.score_by_seed for row in table.rows)
    accuracy = "test accuracy, %"
    headings = [Heading("#Params"), *(Heading(domain, accuracy) for domain in table.columns)]
    headings += [Heading("mean", accuracy)] if averaged else []
    if scored:
        headings.append(Heading("Score"))
        headings += [Heading("Score by seed")] if by_seed else []
        headings.append(Heading("Score / #Params"))
    headings.append(Heading("bits moved"))
    best = _best(table.rows, tuple(plan.domains), places)
    rows = []
    for row in table.rows:
        cells, still = [number(row.params, 2)], row.still
        for column in table.columns:
            own = column == table.own and not row.moves_base
            cell = over_seeds(row.accuracy[column], places, None if own else len(plan.seeds))
            cells.append(marked(cell) if column in still else cell)
        cells += [_mean_cell(row, table)] if averaged else []
        if scored:
            scores = [number(row.whole_score, 0)]
            scores += [over_seeds(row.score_by_seed, 0, len(plan.seeds))] if by_seed else []
            scores.append(number(row.score_per_param, 0))
            cells += [marked(cell) for cell in scores] if still else scores
        cells.append(moved_cell(row))
        strong = best.get(row.label, set())
        cells = [Cell(c.text, c.after, h.title in strong) for h, c in zip(headings, cells, strict=True)]
        rows.append(PageRow(row.label, cells, row.method, row.remark))
    title = f"{plan.benchmark} on {plan.base}"
    return PageTable("results", title, HERE, "method", headings, rows, _result_notes(table))


def rows_table(table: ResultTable) -> PageTable:
    """What stands behind a row's accuracies: seeds, masks that moved, fields that were chosen."""
    plan = table.plan
    fields = list(dict.fromkeys(name for tuned in plan.tuning.values() for name in tuned.fields))
    protocols = {row.method: protocol_of(plan, row) for row in table.rows}
    others = any(set(found) - set(fields) for found in protocols.values())
    headings = [Heading("mean test accuracy, %"), Heading("seeds"), Heading("bits moved")]
    headings += [Heading(name, "chosen on validation") for name in fields]
    headings += [Heading("else not as in the plan", words=True)] if others else []
    rows = []
    for row in table.rows:
        chosen, found = plan.chosen(row.method), protocols[row.method]
        cells = [_mean_cell(row, table), Cell(str(len(row.seeds))), moved_cell(row)]
        cells += [Cell(write_value(chosen[n])) if n in chosen else Cell() for n in fields]
        rest = {name: value for name, value in found.items() if name not in chosen}
        cells += [Cell(settings_text(rest))] if others else []
        rows.append(PageRow(row.label, cells, row.method, row.remark))
    note = "Mean over domains, then ± the standard deviation over seeds that have them all."
    notes = [note, _moved_note(table), *still_note(table.rows)]
    return PageTable("rows", "Behind each row", HERE, "method", headings, rows, notes)


def validation_table(table: ResultTable) -> PageTable | None:
    """Accuracies on validation, where test images without labels leave nothing else."""
    unlabelled = [name for name, facts in table.plan.domains.items() if facts.test is None]
    if not unlabelled:
        return None
    rows = []
    for row in table.rows:
        found = [_mean(one.val_accuracy for one in row.found_on(domain).values()) for domain in unlabelled]
        rows.append(PageRow(row.label, [number(value, _places(table)) for value in found], row.method))
    title = "Accuracy on validation, where test images have no labels here"
    headings = [Heading(domain, "validation accuracy, %") for domain in unlabelled]
    note = "Not test accuracies. Score a submission with `polymask score` to get those."
    return PageTable("validation", title, HERE, "method", headings, rows, [note])


def cost_table(table: ResultTable, frontier: Frontier) -> PageTable:
    """What each method stores and how long it trains, smallest first."""
    members = {point.label for point in frontier.members}
    headings = [
        Heading("frontier"),
        Heading(frontier.measure),
        Heading("paper's", "#Params"),
        Heading("as stored", "#Params"),
        Heading("bits a weight", "a domain adds"),
        Heading("pack", "a domain adds"),
        Heading("training, all domains"),
    ]
    scored = frontier.measure == "score"
    ordered = sorted(table.rows, key=lambda row: (row.params is None, row.params or 0.0))
    rows = []
    for row in ordered:
        value = number(row.whole_score, 0) if scored else number(row.mean, 1)
        cells = [
            Cell("●" if row.label in members else ""),
            marked(value) if row.still else value,
            number(row.params, 3),
            number(row.params_stored, 3),
            number(row.overhead(len(table.plan.domains)), 2),
            Cell() if row.pack_bytes is None else Cell(bytes_text(row.pack_bytes)),
            Cell() if row.seconds is None else Cell(duration_text(row.seconds)),
        ]
        rows.append(PageRow(row.label, cells, row.method))
    note = (
        "#Params and the bits are what must be kept for all domains, without heads. A pack is the file of one domain, "
        "with its head; methods that move the base keep there what they moved."
    )
    return PageTable("costs", "What each method costs", HERE, "method", headings, rows, [note, *still_note(ordered)])


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


def moved_cell(row: ResultRow | None) -> Cell:
    """The share of its masks' bits that moved; nothing where it has no masks."""
    return Cell() if row is None or row.moved is None else Cell(moved_text(row.moved.share))


def still_note(rows: Iterable[ResultRow | None]) -> list[str]:
    """What the mark means, where a row has it."""
    if not any(row is not None and row.still for row in rows):
        return []
    return [
        f"{STILL} Fewer than {100 * LEAST_MOVED:g} % of the bits of its masks moved: what it reached there is due to "
        "its norms and its head, and nothing is concluded from it."
    ]


def _moved_note(table: ResultTable) -> str:
    uncounted = [
        row.label
        for row in table.rows
        if row.moved is None and any(d.layers for o in row.outcomes for d in o.domains.values())
    ]
    or_uncounted = f", or they were not counted ({listed(uncounted)})" if uncounted else ""
    return (
        f"Bits moved: the share of a row's mask bits that are not as they started; {NOTHING}: it has no masks that are "
        f"learned{or_uncounted}."
    )


def _mean_cell(row: ResultRow, table: ResultTable) -> Cell:
    """The mean over domains, with its deviation over seeds where they all have all domains."""
    places, by_seed = _places(table), row.mean_by_seed
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
        still = row.still
        for column in columns:
            one = row.accuracy[column]
            if one is not None and column not in still:
                values.setdefault(column, {})[row.label] = round(one.mean, places)
        if still:
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
    named = {row.label: row.method for row in table.rows if not row.label.startswith(row.method)}
    if named:
        notes.append(f"Called as in the paper: {', '.join(f'{label} is {name}' for label, name in named.items())}.")
    if table.own is not None:
        notes.append(
            f"{table.own} is the base's own domain: {plan.own_accuracy:.1f} % with its own classifier, which methods "
            "that leave the base alone keep; others show what is left."
        )
    if seeds > 1:
        notes.append(
            f"Mean ± standard deviation over {seeds} seeds. Score is that of the mean accuracies; by seed, each seed "
            "is scored alone."
        )
        if any(one is not None and one.n < seeds for row in table.rows for one in row.accuracy.values()):
            notes.append("(n): seeds that are done, where some are not.")
    else:
        notes.append("One seed: nothing is known of the spread.")
    notes.append("Bold: the best of its column, individual networks aside.")
    notes += [_moved_note(table), *still_note(table.rows)]
    if table.missing:
        notes.append(f"{NOTHING}: not done. Missing: {'; '.join(table.missing)}.")
    if table.left_out:
        notes.append(
            f"{table.left_out} results in the folder are of methods or seeds that its plan does not name; they are "
            "left out."
        )
    return notes


def results_csv(table: ResultTable) -> str:
    """One line for each method, direction and domain; empty where nothing is known."""
    file = io.StringIO()
    lines = [_csv_line(table, row, column) for row in table.rows for column in table.columns]
    writer = csv.DictWriter(file, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _csv_line(table: ResultTable, row: ResultRow, column: str) -> dict[str, Any]:
    plan, accuracy, benchmark = table.plan, row.accuracy[column], table.reference.benchmark
    found = list(row.found_on(column).values())
    moved = movement(found)
    return {
        "benchmark": plan.benchmark,
        "base": plan.base,
        "method": row.method,
        "direction": row.direction,
        "domain": column,
        "base_own_domain": "yes" if column == table.own else "no",
        "accuracy_mean": accuracy and accuracy.mean,
        "accuracy_sd": accuracy and accuracy.sd,
        "seeds": 0 if accuracy is None else accuracy.n,
        "seeds_planned": len(plan.seeds),
        "learned_mean": _mean(one.learned for one in found),
        "val_mean": _mean(one.val_accuracy for one in found),
        "mean_all_domains": row.mean,
        "mean_all_domains_sd": row.mean_by_seed and row.mean_by_seed.sd,
        "bits_flipped": moved and moved.flipped,
        "bits_masked": moved and moved.masked,
        "share_moved": moved and moved.share,
        "masks_moved": None if moved is None else "no" if moved.is_still else "yes",
        "chosen": settings_text(plan.chosen(row.method)),
        "protocol": settings_text(protocol_of(plan, row)),
        "points": row.score and benchmark and row.score.per_domain[benchmark.find(column)],
        "pack_bytes": _mean(one.pack_bytes for one in found),
        "bits_per_weight": _mean(one.bits_per_weight for one in found),
        "params": row.params,
        "params_stored": row.params_stored,
        "score": row.whole_score,
        "score_by_seed_mean": row.score_by_seed and row.score_by_seed.mean,
        "score_by_seed_sd": row.score_by_seed and row.score_by_seed.sd,
        "score_per_param": row.score_per_param,
        "seconds_all_domains": row.seconds,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
