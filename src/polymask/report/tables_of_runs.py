"""Tables of how it was run: the plan, each method's training, what was forgotten, layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from polymask.benchmarks.findings import FULL, Forgotten, LayerSummary, which_piggyback
from polymask.benchmarks.records import Plan, Tuned, label_of
from polymask.benchmarks.tables import ResultTable, Statistic, protocol_of
from polymask.report.sheet import Cell, Column, Line, Sheet, listed
from polymask.report.tables_of_results import HERE, number, over_seeds
from polymask.train.recipe import write_value

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
            Cell(write_value(found[name]), strong=True) if name in found else _value(plan.recipe, name)
            for name in names
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
    return ", ".join(write_value(values.get(name)) for name in tuned.fields)


def _value(recipe: Mapping[str, Any], name: str) -> Cell:
    return Cell(write_value(recipe[name])) if name in recipe else Cell()


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
        for name, end in tuned.at_the_end.items():
            text = f"{name} {write_value(tuned.chosen[name])} is the {end} value that was tried"
            ends.setdefault(text, []).append(label_of(method))
    notes += [f"{listed(labels)}: {text}; a better one may lie beyond it." for text, labels in ends.items()]
    remarks = {method: tuned.remark for method, tuned in plan.tuning.items() if tuned.remark}
    return [*notes, *(f"{label_of(method)}: {remark}" for method, remark in remarks.items())]


def domains_sheet(plan: Plan) -> Sheet:
    """The plan's domains and their images."""
    columns = (
        *(Column(title) for title in ("classes", "train", "val", "test")),
        Column("source", words=True),
        Column("notes", words=True),
    )
    lines = []
    for name, facts in plan.domains.items():
        counts = (facts.classes, facts.train, facts.val, facts.test)
        cells = [Cell("no labels" if count is None else f"{count:,}") for count in counts]
        cells += [Cell(facts.source), Cell("; ".join(facts.notes))]
        lines.append(Line(name, tuple(cells)))
    return Sheet("domains", "Domains", "", "domain", columns, tuple(lines))


def plan_facts(plan: Plan) -> dict[str, str]:
    """What was run, by name."""
    selection = {
        "last": "last epoch, trained on train and val",
        "val": "best epoch on val",
        "test": "best epoch on test, which flatters",
    }
    crops = {"1": "centre crop", "submission": "5 or 10 crops, by domain"}
    return {
        "base": f"{plan.base}, {plan.parameters:,} parameters without its classifier",
        "fingerprint": plan.fingerprint,
        "methods": ", ".join(plan.methods),
        "seeds": ", ".join(map(str, plan.seeds)),
        "selection": selection.get(plan.selection, plan.selection),
        "test images": crops.get(plan.crops, f"{plan.crops} crops"),
    }


def recipe_facts(recipe: Mapping[str, Any]) -> dict[str, str]:
    """A recipe's settings as text, nested ones with dots between their names."""
    found: dict[str, str] = {}
    for name, value in recipe.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": text for inner, text in recipe_facts(value).items()}
        elif isinstance(value, list | tuple):
            found[name] = ", ".join(map(str, value))
        else:
            found[name] = str(value)
    return found


def forgetting_sheet(forgotten: Forgotten, plan: Plan) -> Sheet | None:
    """Points that each domain lost between the end of its own training and the end of all."""
    if not forgotten.losses:
        return None
    lines = []
    for loss in forgotten.losses:
        cells = [over_seeds(_signed(one), 1, len(plan.seeds)) for one in loss.lost.values()]
        cells.append(number(None if loss.mean is None else loss.mean + 0.0, 1))
        lines.append(Line(loss.label, tuple(cells)))
    group = "points of test accuracy lost"
    columns = (*(Column(domain, group) for domain in plan.domains), Column("mean", group))
    return Sheet(
        "forgetting-domains",
        "Domains, after the later ones were learned",
        HERE,
        "method",
        columns,
        tuple(lines),
        ("Accuracy right after a domain's own training, less that at the end; below 0 it gained.",),
    )


def base_sheet(forgotten: Forgotten) -> Sheet | None:
    """What became of the base, for methods that move it."""
    found = [loss for loss in forgotten.losses if loss.base is not None]
    if not found:
        return None
    lines = []
    for loss in found:
        assert loss.base is not None
        change = loss.base.change
        percent = None if change is None else Statistic(100 * change.mean, None, change.n)
        cells = [over_seeds(percent, 1, None)]
        cells += [
            over_seeds(one, 1, planned)
            for one, planned in (
                (loss.base.agreement, 1),
                (loss.base.before, None),  # one measurement, whatever the seed
                (loss.base.after, 1),
            )
        ]
        lines.append(Line(loss.label, tuple(cells)))
    columns = (
        Column("weights changed by, %"),
        Column("same class as before, %"),
        Column("own domain before, %"),
        Column("own domain after, %"),
    )
    note = (
        "Weights: |W' − W| / |W| over those that were moved. Same class: the share of the domains' images that the "
        "base's own classifier still puts in the same class. Own domain: that classifier's accuracy."
    )
    return Sheet("forgetting-base", "The base", HERE, "method", columns, tuple(lines), (note,))


def safe_text(forgotten: Forgotten) -> str:
    """Who cannot forget, in a sentence."""
    if not forgotten.safe:
        return ""
    verb = "learns" if len(forgotten.safe) == 1 else "learn"
    return (
        f"{listed(forgotten.safe)} {verb} every domain by itself on a base that does not change: "
        "nothing is forgotten, by construction, and there is nothing to measure."
    )


def _signed(one: Statistic | None) -> Statistic | None:
    """The same without a minus before zero."""
    if one is None or round(one.mean, 1) != 0:
        return one
    return Statistic(0.0, one.sd, one.n)


def anatomy_sheet(anatomies: Sequence[LayerSummary]) -> Sheet | None:
    """The findings of the parameter analysis, as numbers."""
    if not anatomies:
        return None
    scalars = ("k1", "k2", "k3")
    columns = (
        Column("domain", words=True),
        Column("all weights", "ones, %"),
        Column("first third", "ones, %"),
        Column("last third", "ones, %"),
        *(Column(f"|{k}|", "median over layers") for k in scalars),
        *(Column(k, "magnitude, last ÷ first third") for k in scalars),
        Column("k1, k2 of opposite sign, % of layers"),
    )
    lines = []
    for one in anatomies:
        cells = [Cell(one.domain), number(one.ones, 1)]
        cells += [number(one.early_ones, 1), number(one.late_ones, 1)]
        if one.method == FULL:
            cells += [Cell(f"{one.magnitude(k):.2g}") for k in scalars]
            cells += [number(one.growth(k), 1) for k in scalars]
            cells.append(number(one.opposite, 0))
        else:
            cells += [Cell()] * 7
        lines.append(Line(one.label, tuple(cells)))
    notes = (which_piggyback(anatomies), "Thirds are of the layers, from input to output; each layer counts once.")
    return Sheet("layers-table", "In numbers", HERE, "method", columns, tuple(lines), notes)
