"""What a benchmark's report says, whatever it is written in: its first words and its tables."""

from polymask.benchmarks.findings import Findings
from polymask.report.benchmark.forgetting import base_sheet, forgetting_sheet
from polymask.report.benchmark.layers import anatomy_sheet
from polymask.report.benchmark.plan import domains_sheet
from polymask.report.benchmark.published import ablation_sheet, published_sheet
from polymask.report.benchmark.results import cost_sheet, results_sheet, validation_sheet
from polymask.report.benchmark.sheet import Sheet
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
    if frontier.points:
        best = max(frontier.points, key=lambda point: point.value)
        value = f"{best.value:.0f}" if frontier.measure == "score" else f"{best.value:.1f} %"
        members = listed([point.label for point in frontier.members])
        paragraphs.append(
            f"The best {frontier.measure} is {value}, by {best.label} at {best.params:.2f} times "
            f"the parameters of one network. On the frontier of size and {frontier.measure}: "
            f"{members}."
        )
    if not table.reference.whole or table.reference.benchmark is None:
        paragraphs.append(table.reference.remark)
    if table.plan.deviations:
        points = _counted(len(table.plan.deviations), "point")
        paragraphs.append(
            f"The runs leave the paper's protocol in {points}, listed under What was run: mind "
            "that when you compare."
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
        "validation": validation_sheet(table),
        "published": None if published is None else published_sheet(published),
        "costs": cost_sheet(table, findings.frontier),
        "ablation": ablation_sheet(ablations, table) if ablations else None,
        "forgetting": forgetting_sheet(findings.forgotten, table.plan),
        "base": base_sheet(findings.forgotten),
        "layers": anatomy_sheet(findings.anatomies),
        "domains": domains_sheet(table.plan),
    }


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
