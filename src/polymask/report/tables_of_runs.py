"""Tables of how it was run: the plan, each method's training, what was forgotten, layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from polymask.benchmarks.findings import FULL, SCALARS, Forgotten, LayerSummary, which_piggyback
from polymask.benchmarks.records import Plan, Trial, Tuned, label_of
from polymask.benchmarks.tables import ResultTable, Statistic, protocol_of
from polymask.report.page_parts import Cell, Heading, PageRow, PageTable, listed
from polymask.report.tables_of_results import HERE, number, over_seeds
from polymask.train.recipe import write_value

CHOSEN = "●"
_RATES = ("rate", "weight_rate", "head_rate", "epochs")  # shown of every row


def search_table(plan: Plan) -> PageTable | None:
    """Every method with every value that was tried for it: mean accuracy on validation."""
    if not plan.tuning:
        return None
    tried = _tried(plan.tuning)
    rows = []
    for method, tuned in plan.tuning.items():
        found = {_column(tuned, trial.values): trial for trial in tuned.trials}
        chosen = _column(tuned, tuned.chosen)
        cells = []
        for column in tried:
            cell = _trial_cell(found.get(column))
            cells.append(Cell(cell.text, CHOSEN, strong=True) if column == chosen else cell)
        rows.append(PageRow(label_of(method), cells, method))
    names = list(dict.fromkeys(name for tuned in plan.tuning.values() for name in tuned.fields))
    title = f"How each method's {listed(names)} {'was' if len(names) == 1 else 'were'} chosen"
    headings = [Heading(values, fields) for fields, values in tried]
    return PageTable("search", title, HERE, "method", headings, rows, _search_notes(plan))


def _trial_cell(trial: Trial | None) -> Cell:
    if trial is None:
        return Cell()
    return Cell("failed") if trial.mean is None else number(trial.mean, 1)


def _column(tuned: Tuned, values: Mapping[str, Any]) -> tuple[str, str]:
    """Fields and values as they stand over a column."""
    return ", ".join(tuned.fields), ", ".join(write_value(values.get(name)) for name in tuned.fields)


def _tried(tuning: Mapping[str, Tuned]) -> list[tuple[str, str]]:
    """The columns of the searches: fields, and their values, in the order of numbers."""
    columns: dict[str, dict[str, list[Any]]] = {}
    for tuned in tuning.values():
        for trial in tuned.trials:
            fields, text = _column(tuned, trial.values)
            columns.setdefault(fields, {})[text] = [trial.values.get(name) for name in tuned.fields]
    found = []
    for fields, texts in columns.items():
        try:
            ordered = sorted(texts, key=texts.__getitem__)
        except TypeError:  # words beside numbers
            ordered = list(texts)
        found += [(fields, text) for text in ordered]
    return found


def _search_notes(plan: Plan) -> list[str]:
    searched: dict[tuple[tuple[str, ...], int], list[str]] = {}
    for method, tuned in plan.tuning.items():
        searched.setdefault((tuned.domains, tuned.seed), []).append(label_of(method))
    notes = []
    for (domains, seed), labels in searched.items():
        whose = "" if len(searched) == 1 else f" ({listed(labels)})"
        notes.append(
            f"Mean accuracy in % on the validation images of {listed(domains)}, seed {seed} only{whose}; test images "
            f"were not used. {CHOSEN}: chosen, for all domains and seeds."
        )
    ends: dict[str, list[str]] = {}
    for method, tuned in plan.tuning.items():
        for name, end in tuned.at_the_end.items():
            text = f"{name} {write_value(tuned.chosen[name])} is the {end} value that was tried"
            ends.setdefault(text, []).append(label_of(method))
    notes += [f"{listed(labels)}: {text}; a better one may lie beyond it." for text, labels in ends.items()]
    return notes + [f"{label_of(method)}: {tuned.remark}" for method, tuned in plan.tuning.items() if tuned.remark]


def protocol_table(table: ResultTable) -> PageTable | None:
    """The recipe of each row, where one of them leaves the plan's; its own values are bold."""
    recipe = {name: Cell(write_value(value)) for name, value in table.plan.recipe.items()}
    protocols = {row.method: protocol_of(table.plan, row) for row in table.rows}  # the same in both directions
    own = list(dict.fromkeys(name for found in protocols.values() for name in found))
    if not own:
        return None
    names = [*(name for name in _RATES if name in recipe and name not in own), *own]
    rows = [PageRow("the plan", [recipe.get(name, Cell()) for name in names])]
    for method, found in protocols.items():
        cells = recipe | {name: Cell(write_value(value), strong=True) for name, value in found.items()}
        rows.append(PageRow(label_of(method), [cells.get(name, Cell()) for name in names], method))
    note = (
        "Bold: not as in the plan, by hand or by the search. Whole weights (fine-tuning) learn at weight_rate, "
        "everything else but the head at rate."
    )
    headings = [Heading(name) for name in names]
    return PageTable("protocols", "Each row's own protocol", "", "method", headings, rows, [note])


def domains_table(plan: Plan) -> PageTable:
    """The plan's domains and their images."""
    headings = [Heading(title) for title in ("classes", "train", "val", "test")]
    headings += [Heading("source", words=True), Heading("notes", words=True)]
    rows = []
    for name, facts in plan.domains.items():
        counts = (facts.classes, facts.train, facts.val, facts.test)
        cells = [Cell("no labels" if count is None else f"{count:,}") for count in counts]
        rows.append(PageRow(name, [*cells, Cell(facts.source), Cell("; ".join(facts.notes))]))
    return PageTable("domains", "Domains", "", "domain", headings, rows)


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
        else:
            found[name] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return found


def forgetting_table(forgotten: Forgotten, plan: Plan) -> PageTable | None:
    """Points that each domain lost between the end of its own training and the end of all."""
    if not forgotten.losses:
        return None
    rows = []
    for loss in forgotten.losses:
        cells = [over_seeds(_without_minus_zero(one), 1, len(plan.seeds)) for one in loss.lost.values()]
        cells.append(number(None if loss.mean is None else loss.mean + 0.0, 1))
        rows.append(PageRow(loss.label, cells))
    headings = [Heading(domain, "points of test accuracy lost") for domain in (*plan.domains, "mean")]
    title = "Domains, after the later ones were learned"
    note = "Accuracy right after a domain's own training, less that at the end; below 0 it gained."
    return PageTable("forgetting-domains", title, HERE, "method", headings, rows, [note])


def _without_minus_zero(one: Statistic | None) -> Statistic | None:
    return one if one is None or round(one.mean, 1) != 0 else Statistic(0.0, one.sd, one.n)


def base_table(forgotten: Forgotten) -> PageTable | None:
    """How the base changed, for methods that move it."""
    bases = {loss.label: loss.base for loss in forgotten.losses if loss.base is not None}
    if not bases:
        return None
    rows = []
    for label, base in bases.items():
        cells = [
            number(None if base.change is None else 100 * base.change.mean, 1),
            over_seeds(base.agreement, 1, 1),
            over_seeds(base.before, 1, None),  # one measurement, whatever the seed
            over_seeds(base.after, 1, 1),
        ]
        rows.append(PageRow(label, cells))
    titles = ("weights changed by, %", "same class as before, %", "own domain before, %", "own domain after, %")
    note = (
        "Weights: |W' − W| / |W| over those that were moved. Same class: the share of the domains' images that the "
        "base's own classifier still puts in the same class. Own domain: that classifier's accuracy."
    )
    return PageTable("forgetting-base", "The base", HERE, "method", [Heading(title) for title in titles], rows, [note])


def safe_text(forgotten: Forgotten) -> str:
    """Who cannot forget, in a sentence."""
    if not forgotten.safe:
        return ""
    verb = "learns" if len(forgotten.safe) == 1 else "learn"
    return (
        f"{listed(forgotten.safe)} {verb} every domain by itself on a base that does not change: nothing is "
        "forgotten, by construction, and there is nothing to measure."
    )


def layers_table(summaries: Sequence[LayerSummary]) -> PageTable | None:
    """The findings of the parameter analysis, as numbers."""
    if not summaries:
        return None
    headings = [
        Heading("domain", words=True),
        *(Heading(title, "ones, %") for title in ("all weights", "first third", "last third")),
        *(Heading(f"|{k}|", "median over layers") for k in SCALARS),
        *(Heading(k, "magnitude, last ÷ first third") for k in SCALARS),
        Heading("k1, k2 of opposite sign, % of layers"),
    ]
    rows = []
    for one in summaries:
        cells = [Cell(one.domain), *(number(ones, 1) for ones in (one.ones, one.early_ones, one.late_ones))]
        if one.method == FULL:
            cells += [Cell(f"{one.magnitude(k):.2g}") for k in SCALARS]
            cells += [number(one.growth(k), 1) for k in SCALARS]
            cells.append(number(one.opposite, 0))
        else:
            cells += [Cell()] * 7
        rows.append(PageRow(one.label, cells))
    note = "Thirds are of the layers, from input to output; each layer counts once."
    return PageTable("layers-table", "In numbers", HERE, "method", headings, rows, [which_piggyback(summaries), note])
