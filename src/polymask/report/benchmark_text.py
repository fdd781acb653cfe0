"""The report of a benchmark's runs as Markdown: its words and tables, without the figures."""

from polymask.benchmarks.findings import Findings
from polymask.report.benchmark_contents import (
    all_sheets,
    headline,
    lead,
    left_out_text,
    unmoved_text,
)
from polymask.report.benchmark_forgetting import safe_text
from polymask.report.benchmark_plan import plan_facts, recipe_facts
from polymask.report.sheet import escaped, markdown

_CHAPTERS = {
    "Results": ("results", "rows", "validation", "published"),
    "Who is ahead of whom": ("ahead", "ahead_full"),
    "How each method was trained": ("search", "protocols"),
    "Size against score": ("costs",),
    "Ablation": ("ablation",),
    "Forgetting": ("forgetting", "base"),
    "Masks and scalars by layer": ("layers",),
}


def benchmark_markdown(findings: Findings) -> str:
    """The report's words and tables."""
    plan, sheets = findings.table.plan, all_sheets(findings)
    parts = [f"# {escaped(headline(findings))}", *map(escaped, lead(findings))]
    words = {
        "Size against score": left_out_text(findings),
        "Forgetting": safe_text(findings.forgotten),
        "Masks and scalars by layer": unmoved_text(findings),
    }
    for title, names in _CHAPTERS.items():
        body = [escaped(words[title])] if words.get(title) else []
        body += [markdown(sheet) for name in names if (sheet := sheets[name]) is not None]
        if body:
            parts += [f"## {title}", *body]
    parts.append("## What was run")
    parts.append("\n".join(f"    {line}" for line in plan.command.splitlines()))
    if plan.deviations:
        parts.append("Not as in the paper:")
        parts.append("\n".join(f"- {escaped(deviation)}" for deviation in plan.deviations))
    domains = sheets["domains"]
    assert domains is not None  # a plan has domains
    parts.append(markdown(domains))
    for title, facts in (
        ("Plan", plan_facts(plan)),
        ("Recipe", recipe_facts(plan.recipe)),
        ("Environment", plan.environment),
    ):
        listed = "\n".join(f"- {escaped(name)}: {escaped(text)}" for name, text in facts.items())
        parts += [f"### {title}", listed]
    return "\n\n".join(parts) + "\n"
