"""The report of a benchmark's runs: one HTML file, the same tables as Markdown, and a CSV file."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from polymask.benchmarks.findings import FULL, Findings, find
from polymask.benchmarks.records import label_of, movement, read_runs
from polymask.benchmarks.tables import ResultRow, ResultTable, protocol_of, settings_text
from polymask.errors import BenchmarkError
from polymask.files import write_atomically
from polymask.report import canvas as palette
from polymask.report import sheet as wording
from polymask.report.drawings import draw
from polymask.report.sheet import Sheet, escaped, listed, markdown
from polymask.report.tables_of_results import cost_sheet, results_sheet, rows_sheet, validation_sheet
from polymask.report.tables_of_rivals import ablation_sheet, comparison_sheet, published_sheet
from polymask.report.tables_of_runs import (
    anatomy_sheet,
    base_sheet,
    domains_sheet,
    forgetting_sheet,
    plan_facts,
    protocol_sheet,
    recipe_facts,
    safe_text,
    search_sheet,
)


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
            f"The best {frontier.measure} is {value}, by {best.label} at {best.params:.2f} times the parameters of "
            f"one network. On the frontier of size and {frontier.measure}: {members}."
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
        "layers": anatomy_sheet(findings.layers),
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


PAGE, MARKDOWN, CSV = "report.html", "report.md", "results.csv"


def write_report(runs: str | Path, out: str | Path | None = None) -> tuple[Findings, list[Path]]:
    """Write the three files, each whole or not at all, into `out`, or beside the runs.

    What comes back is what they say, and where they are.
    """
    findings = find(read_runs(runs))
    folder = Path(runs if out is None else out)
    contents = {  # all are made before any is written
        PAGE: benchmark_page(findings),
        MARKDOWN: benchmark_markdown(findings),
        CSV: results_csv(findings.table),
    }
    encoded = {name: text.encode() for name, text in contents.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchmarkError(f"{folder} cannot be made: {error.strerror}; give --out") from error
    for name, data in encoded.items():
        write_atomically(folder / name, data)
    return findings, [folder / name for name in encoded]


def results_csv(table: ResultTable) -> str:
    """One line for each method, direction and domain; empty where nothing is known."""
    file = io.StringIO()
    lines = [_line(table, row, column) for row in table.rows for column in table.columns]
    writer = csv.DictWriter(file, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _line(table: ResultTable, row: ResultRow, column: str) -> dict[str, Any]:
    plan, accuracy = table.plan, row.accuracy[column]
    found = list(row.found_on(column).values())
    points = None if row.score is None else _points(table, row, column)
    moved = movement(found)
    return {
        "benchmark": plan.benchmark,
        "base": plan.base,
        "method": row.method,
        "direction": row.direction,
        "domain": column,
        "base_own_domain": "yes" if column == table.own else "no",
        "accuracy_mean": None if accuracy is None else accuracy.mean,
        "accuracy_sd": None if accuracy is None else accuracy.sd,
        "seeds": 0 if accuracy is None else accuracy.n,
        "seeds_planned": len(plan.seeds),
        "learned_mean": _mean(one.learned for one in found),
        "val_mean": _mean(one.val_accuracy for one in found),
        "mean_all_domains": row.mean,
        "mean_all_domains_sd": None if row.mean_by_seed is None else row.mean_by_seed.sd,
        "bits_flipped": None if moved is None else moved.flipped,
        "bits_masked": None if moved is None else moved.masked,
        "share_moved": None if moved is None else moved.share,
        "masks_moved": None if moved is None else "no" if moved.is_still else "yes",
        "chosen": settings_text(plan.chosen(row.method)),
        "protocol": settings_text(protocol_of(plan, row)),
        "points": points,
        "pack_bytes": _mean(one.pack_bytes for one in found),
        "bits_per_weight": _mean(one.bits_per_weight for one in found),
        "params": row.params,
        "params_stored": row.params_stored,
        "score": None if row.score is None else row.score.score,
        "score_by_seed_mean": None if row.score_by_seed is None else row.score_by_seed.mean,
        "score_by_seed_sd": None if row.score_by_seed is None else row.score_by_seed.sd,
        "score_per_param": row.score_per_param,
        "seconds_all_domains": row.seconds,
    }


def _points(table: ResultTable, row: ResultRow, column: str) -> float:
    """What a column gives to the score, whatever the benchmark calls it."""
    assert row.score is not None
    assert table.reference.benchmark is not None
    return row.score.per_domain[table.reference.benchmark.find(column)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
