"""What a benchmark's report says, whatever it is written in: its first words and its tables."""

from polymask.benchmarks.anatomy import FULL
from polymask.benchmarks.findings import Findings
from polymask.benchmarks.naming import label_of
from polymask.report.benchmark_ahead import comparison_sheet
from polymask.report.benchmark_forgetting import base_sheet, forgetting_sheet
from polymask.report.benchmark_layers import anatomy_sheet
from polymask.report.benchmark_plan import domains_sheet
from polymask.report.benchmark_published import ablation_sheet, published_sheet
from polymask.report.benchmark_results import (
    cost_sheet,
    results_sheet,
    rows_sheet,
    validation_sheet,
)
from polymask.report.benchmark_training import protocol_sheet, search_sheet
from polymask.report.sheet import Sheet
from polymask.report.wording import listed


def headline(findings: Findings) -> str:
    """The report in a line."""
    plan = findings.table.plan
    methods = len({row.method for row in findings.table.rows})
    return (
        f"{plan.benchmark} on {plan.base}: {_counted(methods, 'method')}, "
        f"{_counted(len(plan.domains), 'domain')}, {_counted(len(plan.seeds), 'seed')}"
    )


def lead(findings: Findings) -> list[str]:
    """What a reader wants to know first, a paragraph each."""
    table, frontier = findings.table, findings.frontier
    paragraphs = []
    if frontier.members:
        best = max(frontier.members, key=lambda point: point.value)
        value = f"{best.value:.0f}" if frontier.measure == "score" else f"{best.value:.1f} %"
        members = listed([point.label for point in frontier.members])
        paragraphs.append(
            f"The best {frontier.measure} is {value}, by {best.label} at {best.params:.2f} times "
            f"the parameters of one network. On the frontier of size and {frontier.measure}: "
            f"{members}."
        )
    paragraphs += [
        f"{one.sentence}." for one in findings.comparisons.get("finetune", ()) if one.method == label_of(FULL)
    ]
    if still := [f"{row.label} ({', '.join(row.still)})" for row in table.rows if row.still]:
        paragraphs.append(f"Nothing is concluded from masks that did not move: {listed(still)}.")
    if not table.reference.whole or table.reference.benchmark is None:
        paragraphs.append(table.reference.remark)
    if table.plan.deviations:
        points = _counted(len(table.plan.deviations), "point")
        paragraphs.append(
            f"The runs leave the paper's protocol in {points}, listed under What was run: mind that when you compare."
        )
    if table.missing:
        paragraphs.append(f"Not finished: {'; '.join(table.missing)}.")
    return paragraphs


def all_sheets(findings: Findings) -> dict[str, Sheet | None]:
    """Every table by name; None where there is nothing to show."""
    table, published = findings.table, findings.published
    ablations = findings.ablations
    return {
        "results": results_sheet(table),
        "rows": rows_sheet(table),
        "validation": validation_sheet(table),
        "published": None if published is None else published_sheet(published),
        "ahead": comparison_sheet("individual", findings.comparisons.get("finetune", ())),
        "ahead_full": comparison_sheet("full", findings.comparisons.get(FULL, ())),
        "search": search_sheet(table.plan),
        "protocols": protocol_sheet(table),
        "costs": cost_sheet(table, findings.frontier),
        "ablation": ablation_sheet(ablations, table) if ablations else None,
        "forgetting": forgetting_sheet(findings.forgotten, table.plan),
        "base": base_sheet(findings.forgotten),
        "layers": anatomy_sheet(findings.anatomies),
        "domains": domains_sheet(table.plan),
    }


def left_out_text(findings: Findings) -> str:
    """Which methods the frontier does not have, and why."""
    left_out = [point.label for point in findings.frontier.left_out]
    if not left_out:
        return ""
    return f"Not compared, because masks did not move: {listed(left_out)}."


def unmoved_text(findings: Findings) -> str:
    """Which masks are not shown by layer, and why."""
    told = [f"{label} ({', '.join(domains)})" for label, domains in findings.unmoved.items()]
    return f"Left out, because their masks did not move: {listed(told)}." if told else ""


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
