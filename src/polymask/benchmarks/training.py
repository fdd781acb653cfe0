"""How each row was trained: what a search chose for it, and where it leaves the plan's recipe."""

import json
from collections.abc import Mapping
from typing import Any

from polymask.benchmarks.records import Plan, Tuned
from polymask.benchmarks.tables import Row


def chosen_of(plan: Plan, method: str) -> Mapping[str, Any]:
    """The fields that a search chose for a method; none where there was no search."""
    return plan.tuning[method].chosen if method in plan.tuning else {}


def protocol_of(plan: Plan, row: Row) -> dict[str, Any]:
    """The fields in which a row was trained differently from the plan's recipe.

    What its results say counts; where they say nothing, what the plan says of it.
    """
    asked = {**plan.protocols.get(row.method, {}), **chosen_of(plan, row.method)}
    trained = next((o.recipe for o in row.outcomes if o.recipe), {})
    known = {name: value for name, value in trained.items() if name in plan.recipe}
    return {
        name: value
        for name, value in {**asked, **known}.items()
        if name != "name" and not (name in plan.recipe and _equal(value, plan.recipe[name]))
    }


def at_the_end(tuned: Tuned) -> dict[str, str]:
    """Fields whose chosen value is the "smallest" or the "largest" that was tried."""
    found = {}
    for name, value in tuned.chosen.items():
        tried = [trial.values.get(name) for trial in tuned.trials]
        numbers = [n for n in tried if isinstance(n, int | float) and not isinstance(n, bool)]
        if len(set(numbers)) > 1 and value in (min(numbers), max(numbers)):
            found[name] = "smallest" if value == min(numbers) else "largest"
    return found


def settings_text(settings: Mapping[str, Any]) -> str:
    """{"rate": 0.001} -> "rate=0.001"."""
    return ", ".join(f"{name}={value_text(value)}" for name, value in settings.items())


def value_text(value: Any) -> str:
    """A field's value as one would write it on a command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(value_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _equal(a: Any, b: Any) -> bool:
    """Whether they are the same once they are written down: (4,) is [4]."""
    return json.dumps(a) == json.dumps(b)
