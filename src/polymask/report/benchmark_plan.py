"""What was run: the plan of the runs, as a reader wants it."""

from collections.abc import Mapping
from typing import Any

from polymask.benchmarks.records import Plan
from polymask.report.sheet import Cell, Column, Line, Sheet


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
