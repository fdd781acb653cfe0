"""The short table at the end of a benchmark: accuracies by method and domain. Needs no torch."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from polymask.benchmarks.naming import ARROWS
from polymask.benchmarks.records import Outcome, Plan


def summarise(plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Mean test accuracies over seeds, as one JSON object."""
    rows: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault((outcome.method, outcome.direction), []).append(outcome)
    return {
        "benchmark": plan.benchmark,
        "base": plan.base,
        "domains": list(plan.domains),
        "seeds": list(plan.seeds),
        "deviations": list(plan.deviations),
        "rows": [
            {
                "method": method,
                "direction": direction,
                "label": f"{method}{ARROWS[direction]}",
                "params": found[0].params_paper,
                "accuracy": {domain: _mean(found, domain) for domain in plan.domains},
            }
            for (method, direction), found in rows.items()
        ],
    }


def _mean(outcomes: Sequence[Outcome], domain: str) -> float | None:
    values = [
        outcome.domains[domain].test_accuracy for outcome in outcomes if domain in outcome.domains
    ]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
