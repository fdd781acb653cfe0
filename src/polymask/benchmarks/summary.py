"""The short table at the end of a benchmark: accuracies by method and domain. Needs no torch."""

from collections.abc import Sequence
from typing import Any

from polymask.benchmarks.naming import ARROWS
from polymask.benchmarks.records import Outcome, Plan, Runs
from polymask.benchmarks.tables import Row, tabulate
from polymask.benchmarks.training import chosen_of, protocol_of


def summarise(plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Mean test accuracies over seeds with their deviations, as one JSON object."""
    table = tabulate(Runs(plan, tuple(outcomes)))
    return {
        "benchmark": plan.benchmark,
        "base": plan.base,
        "domains": list(plan.domains),
        "seeds": list(plan.seeds),
        "deviations": list(plan.deviations),
        "rows": [_summary_row(plan, row) for row in table.rows if row.outcomes],
    }


def _summary_row(plan: Plan, row: Row) -> dict[str, Any]:
    accuracy = {domain: row.accuracy[domain] for domain in plan.domains}
    return {
        "method": row.method,
        "direction": row.direction,
        "label": f"{row.method}{ARROWS[row.direction]}",
        "params": row.params,
        "seeds": len(row.seeds),
        "accuracy": {domain: one and one.mean for domain, one in accuracy.items()},
        "deviation": {domain: one and one.sd for domain, one in accuracy.items()},
        "share_moved": row.moved and row.moved.share,
        "remark": row.remark,
        "chosen": dict(chosen_of(plan, row.method)),
        "protocol": protocol_of(plan, row),
    }
