"""The report of a benchmark's runs as one HTML file that needs nothing else to be read."""

from pathlib import Path

from polymask.benchmarks.findings import Findings
from polymask.report import palette, wording
from polymask.report.benchmark_contents import (
    all_sheets,
    headline,
    lead,
    left_out_text,
    unmoved_text,
)
from polymask.report.benchmark_drawings import draw
from polymask.report.benchmark_forgetting import safe_text
from polymask.report.benchmark_plan import plan_facts, recipe_facts

_TEMPLATES = Path(__file__).parent / "templates"


def benchmark_page(findings: Findings) -> str:
    """The report as HTML; equal findings give equal text."""
    import jinja2

    page = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters["listed"] = wording.listed
    plan = findings.table.plan
    return page.get_template("benchmark.html.j2").render(
        findings=findings,
        plan=plan,
        sheets=all_sheets(findings),
        headline=headline(findings),
        lead=lead(findings),
        safe=safe_text(findings.forgotten),
        left_out=left_out_text(findings),
        unmoved=unmoved_text(findings),
        facts=plan_facts(plan),
        recipe=recipe_facts(plan.recipe),
        drawn=draw(findings),
        light=palette.variables("light"),
        dark=palette.variables("dark"),
    )
