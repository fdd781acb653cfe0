"""How each method was trained: the searches for its fields, and where it leaves the plan."""

from collections.abc import Mapping
from typing import Any

from polymask.benchmarks.naming import label_of
from polymask.benchmarks.records import Plan, Tuned
from polymask.benchmarks.tables import ResultTable
from polymask.benchmarks.training import at_the_end, protocol_of, value_text
from polymask.report.benchmark_results import HERE, number
from polymask.report.sheet import Cell, Column, Line, Sheet
from polymask.report.wording import listed

CHOSEN = "●"
_RATES = ("rate", "weight_rate", "head_rate", "epochs")  # shown of every row


def search_sheet(plan: Plan) -> Sheet | None:
    """Every method with every value that was tried for it: mean accuracy on validation."""
    if not plan.tuning:
        return None
    tried = _tried(plan.tuning)
    columns = tuple(Column(title, group) for group, title in tried)
    lines = []
    for method, tuned in plan.tuning.items():
        found = {_place(tuned, trial.values): trial for trial in tuned.trials}
        chosen = _place(tuned, tuned.chosen)
        cells = []
        for place in tried:
            trial = found.get(place)
            cell = Cell() if trial is None else number(trial.mean, 1)
            failed = trial is not None and trial.mean is None
            cell = Cell("failed") if failed else cell
            cells.append(Cell(cell.text, CHOSEN, strong=True) if place == chosen else cell)
        lines.append(Line(label_of(method), tuple(cells), method))
    names = list(dict.fromkeys(name for tuned in plan.tuning.values() for name in tuned.fields))
    verb = "was" if len(names) == 1 else "were"
    return Sheet(
        "search",
        f"How each method's {listed(names)} {verb} chosen",
        HERE,
        "method",
        columns,
        tuple(lines),
        tuple(_search_notes(plan)),
    )


def protocol_sheet(table: ResultTable) -> Sheet | None:
    """The recipe of each row, where one of them leaves the plan's; its own values are bold."""
    plan = table.plan
    rows = {row.method: row for row in table.rows}  # the same in both directions
    protocols = {method: protocol_of(plan, row) for method, row in rows.items()}
    own = list(dict.fromkeys(name for found in protocols.values() for name in found))
    if not own:
        return None
    names = [*(name for name in _RATES if name in plan.recipe and name not in own), *own]
    lines = [Line("the plan", tuple(_value(plan.recipe, name) for name in names))]
    for method, found in protocols.items():
        cells = [
            Cell(value_text(found[name]), strong=True) if name in found else _value(plan.recipe, name) for name in names
        ]
        lines.append(Line(label_of(method), tuple(cells), method))
    return Sheet(
        "protocols",
        "Each row's own protocol",
        "",
        "method",
        tuple(Column(name) for name in names),
        tuple(lines),
        (
            "Bold: not as in the plan, by hand or by the search. Whole weights (fine-tuning) learn "
            "at weight_rate, everything else but the head at rate.",
        ),
    )


def _tried(tuning: Mapping[str, Tuned]) -> list[tuple[str, str]]:
    """The columns of the searches: fields, and their values, in the order of numbers."""
    values: dict[tuple[str, ...], dict[str, list[Any]]] = {}
    for tuned in tuning.values():
        for trial in tuned.trials:
            texts = values.setdefault(tuned.fields, {})
            texts[_title(tuned, trial.values)] = [trial.values.get(n) for n in tuned.fields]
    return [(", ".join(fields), title) for fields, texts in values.items() for title in _sorted_by_value(texts)]


def _sorted_by_value(texts: Mapping[str, list[Any]]) -> list[str]:
    try:
        return sorted(texts, key=lambda title: texts[title])
    except TypeError:  # words beside numbers
        return list(texts)


def _place(tuned: Tuned, values: Mapping[str, Any]) -> tuple[str, str]:
    return ", ".join(tuned.fields), _title(tuned, values)


def _title(tuned: Tuned, values: Mapping[str, Any]) -> str:
    return ", ".join(value_text(values.get(name)) for name in tuned.fields)


def _value(recipe: Mapping[str, Any], name: str) -> Cell:
    return Cell(value_text(recipe[name])) if name in recipe else Cell()


def _search_notes(plan: Plan) -> list[str]:
    searched: dict[tuple[tuple[str, ...], int], list[str]] = {}
    for method, tuned in plan.tuning.items():
        searched.setdefault((tuned.domains, tuned.seed), []).append(label_of(method))
    notes = []
    for (domains, seed), labels in searched.items():
        whose = "" if len(searched) == 1 else f" ({listed(labels)})"
        notes.append(
            f"Mean accuracy in % on the validation images of {listed(domains)}, seed {seed} only"
            f"{whose}; test images had no part in it. {CHOSEN}: chosen, for all domains and seeds."
        )
    ends: dict[str, list[str]] = {}
    for method, tuned in plan.tuning.items():
        for name, end in at_the_end(tuned).items():
            text = f"{name} {value_text(tuned.chosen[name])} is the {end} value that was tried"
            ends.setdefault(text, []).append(label_of(method))
    notes += [f"{listed(labels)}: {text}; a better one may lie beyond it." for text, labels in ends.items()]
    remarks = {method: tuned.remark for method, tuned in plan.tuning.items() if tuned.remark}
    return [*notes, *(f"{label_of(method)}: {remark}" for method, remark in remarks.items())]
