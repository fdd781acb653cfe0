"""The report of a benchmark's runs: one HTML file, the same tables as Markdown, and a CSV file."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polymask.benchmarks.findings import FULL, Findings, LayerSummary, find, which_piggyback
from polymask.benchmarks.records import DomainOutcome, EpochPoint, counted, label_of, read_runs
from polymask.benchmarks.tables import ResultRow, ResultTable
from polymask.errors import BenchmarkError
from polymask.files import write_atomically
from polymask.report import figures
from polymask.report.page_parts import PageTable, escaped, listed, markdown, render
from polymask.report.tables_of_results import cost_table, results_csv, results_table, rows_table, validation_table
from polymask.report.tables_of_rivals import ablation_table, comparison_table, published_table
from polymask.report.tables_of_runs import (
    base_table,
    domains_table,
    forgetting_table,
    layers_table,
    plan_facts,
    protocol_table,
    recipe_facts,
    safe_text,
    search_table,
)

PAGE, MARKDOWN, CSV = "report.html", "report.md", "results.csv"

_CHAPTERS = {
    "Results": ("results", "rows", "validation", "published"),
    "Who is ahead of whom": ("ahead", "ahead_full"),
    "How each method was trained": ("search", "protocols"),
    "Size against score": ("costs",),
    "Ablation": ("ablation",),
    "Forgetting": ("forgetting", "base"),
    "Masks and scalars by layer": ("layers",),
}

_MOST_CURVES = 6  # in one figure
_MOST_DENSITIES = 5
_CURVES_FIRST = ("finetune", "affine-full", "piggyback", "classifier-only", "affine-simple")

Titled = tuple[str, str]  # a figure's title and its SVG


def write_report(runs: str | Path, out: str | Path | None = None) -> tuple[Findings, list[Path]]:
    """Write the three files, each whole or not at all, into `out`, or beside the runs.

    Returns what they say, and where they are.
    """
    findings = find(read_runs(runs))
    folder = Path(runs if out is None else out)
    contents = {  # all are made before any is written
        PAGE: benchmark_page(findings).encode(),
        MARKDOWN: benchmark_markdown(findings).encode(),
        CSV: results_csv(findings.table).encode(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchmarkError(f"{folder} cannot be made: {error.strerror}; give --out") from error
    for name, data in contents.items():
        write_atomically(folder / name, data)
    return findings, [folder / name for name in contents]


def benchmark_page(findings: Findings) -> str:
    """The report as HTML; equal findings give equal text."""
    plan = findings.table.plan
    return render(
        "benchmark.html.j2",
        findings=findings,
        plan=plan,
        tables=all_tables(findings),
        headline=headline(findings),
        lead=lead(findings),
        safe=safe_text(findings.forgotten),
        left_out=left_out_text(findings),
        unmoved=unmoved_text(findings),
        facts=plan_facts(plan),
        recipe=recipe_facts(plan.recipe),
        drawn=draw(findings),
    )


def benchmark_markdown(findings: Findings) -> str:
    """The report's words and tables."""
    plan, tables = findings.table.plan, all_tables(findings)
    parts = [f"# {escaped(headline(findings))}", *map(escaped, lead(findings))]
    words = {
        "Size against score": left_out_text(findings),
        "Forgetting": safe_text(findings.forgotten),
        "Masks and scalars by layer": unmoved_text(findings),
    }
    for title, names in _CHAPTERS.items():
        body = [escaped(words[title])] if words.get(title) else []
        body += [markdown(table) for name in names if (table := tables[name]) is not None]
        if body:
            parts += [f"## {title}", *body]
    parts += ["## What was run", "\n".join(f"    {line}" for line in plan.command.splitlines())]
    if plan.deviations:
        parts += ["Not as in the paper:", "\n".join(f"- {escaped(deviation)}" for deviation in plan.deviations)]
    parts.append(markdown(domains_table(plan)))
    facts = {"Plan": plan_facts(plan), "Recipe": recipe_facts(plan.recipe), "Environment": plan.environment}
    for title, values in facts.items():
        parts += [f"### {title}", "\n".join(f"- {escaped(name)}: {escaped(text)}" for name, text in values.items())]
    return "\n\n".join(parts) + "\n"


def headline(findings: Findings) -> str:
    """The report in a line."""
    plan = findings.table.plan
    methods = len({row.method for row in findings.table.rows})
    return (
        f"{plan.benchmark} on {plan.base}: {counted(methods, 'method')}, {counted(len(plan.domains), 'domain')}, "
        f"{counted(len(plan.seeds), 'seed')}"
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
            f"The best {frontier.measure} is {value}, by {best.label} at {best.params:.2f} times the parameters of one "
            f"network. On the frontier of size and {frontier.measure}: {members}."
        )
    against = findings.comparisons.get("finetune", ())
    paragraphs += [f"{one.sentence}." for one in against if one.method == label_of(FULL)]
    if still := [f"{row.label} ({', '.join(row.still)})" for row in table.rows if row.still]:
        paragraphs.append(f"Nothing is concluded from masks that did not move: {listed(still)}.")
    if not table.reference.whole or table.reference.benchmark is None:
        paragraphs.append(table.reference.remark)
    if table.plan.deviations:
        points = counted(len(table.plan.deviations), "point")
        paragraphs.append(
            f"The runs leave the paper's protocol in {points}, listed under What was run: mind that when you compare."
        )
    if table.missing:
        paragraphs.append(f"Not finished: {'; '.join(table.missing)}.")
    return paragraphs


def left_out_text(findings: Findings) -> str:
    """Which methods the frontier does not have, and why."""
    left_out = [point.label for point in findings.frontier.left_out]
    return f"Not compared, because masks did not move: {listed(left_out)}." if left_out else ""


def unmoved_text(findings: Findings) -> str:
    """Which masks are not shown by layer, and why."""
    told = [f"{label} ({', '.join(domains)})" for label, domains in findings.unmoved.items()]
    return f"Left out, because their masks did not move: {listed(told)}." if told else ""


def all_tables(findings: Findings) -> dict[str, PageTable | None]:
    """Every table by name; None where there is nothing to show."""
    table, published, ablations = findings.table, findings.published, findings.ablations
    return {
        "results": results_table(table),
        "rows": rows_table(table),
        "validation": validation_table(table),
        "published": None if published is None else published_table(published),
        "ahead": comparison_table("individual", findings.comparisons.get("finetune", ())),
        "ahead_full": comparison_table("full", findings.comparisons.get(FULL, ())),
        "search": search_table(table.plan),
        "protocols": protocol_table(table),
        "costs": cost_table(table, findings.frontier),
        "ablation": ablation_table(ablations, table) if ablations else None,
        "forgetting": forgetting_table(findings.forgotten, table.plan),
        "base": base_table(findings.forgotten),
        "layers": layers_table(findings.layers),
        "domains": domains_table(table.plan),
    }


def draw(findings: Findings) -> dict[str, Any]:
    """The page's figures as SVG, and what they show; empty where there is nothing to draw."""
    table, frontier = findings.table, findings.frontier
    lost = {loss.label: loss.mean for loss in findings.forgotten.losses if loss.mean is not None}
    compared = [one for one in findings.comparisons.get("finetune", ()) if one.mean is not None]
    done = [row for row in table.rows if row.outcomes]
    chosen = _shown_first(done)
    images = {"val": "validation", "test": "test"}.get(table.plan.selection, "training")
    return {
        "size": figures.size_against_score(frontier, name="size") if frontier.points else "",
        "ahead": figures.differences(compared, name="ahead") if compared else "",
        "lost": figures.points_lost(lost, name="lost") if lost else "",
        "densities": list(_densities(findings.layers)),
        "densities_of": which_piggyback(findings.layers),
        "scalars": list(_scalars(findings.layers)),
        "curves": list(_curves(table, chosen, images)),
        "curves_of": f"Accuracy on {images} images after each epoch, and the training loss during it",
        "curves_without": len(done) - len(chosen),  # methods that they do not show
    }


def _densities(summaries: Sequence[LayerSummary]) -> Iterator[Titled]:
    by_method: dict[str, list[LayerSummary]] = {}
    for one in summaries:
        by_method.setdefault(one.label, []).append(one)
    for label, found in by_method.items():
        count = -(-len(found) // _MOST_DENSITIES)
        each = -(-len(found) // count)
        for start in range(0, len(found), each):
            stacks = {one.domain: one.layers for one in found[start : start + each]}
            yield label, figures.density_by_depth(stacks, name=f"density-{found[0].method}-{start}")


def _scalars(summaries: Sequence[LayerSummary]) -> Iterator[Titled]:
    full = [one for one in summaries if one.method == FULL]
    limit = figures.largest_scalar(layer for one in full for layer in one.layers)
    for place, one in enumerate(full):
        yield one.domain, figures.scalars_by_depth(one.layers, name=f"scalars-{place}", limit=limit)


def _shown_first(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The methods that readers compare first, in the plan's order."""
    rank = {method: place for place, method in enumerate(_CURVES_FIRST)}
    first = sorted(rows, key=lambda row: rank.get(row.method, len(rank)))[:_MOST_CURVES]
    return [row for row in rows if row in first]


def _curves(table: ResultTable, chosen: Sequence[ResultRow], images: str) -> Iterator[Titled]:
    for place, domain in enumerate(table.plan.domains):
        curves = {row.label: _points(row.found_on(domain)) for row in chosen}
        curves = {label: points for label, points in curves.items() if points}
        if curves:
            yield domain, figures.accuracy_and_loss(curves, name=f"curves-{place}", images=images)


def _points(found: Mapping[int, DomainOutcome]) -> list[EpochPoint]:
    """The first seed's epochs, counted through all stages of its training."""
    points = []
    for place, epoch in enumerate(found[min(found)].epochs if found else ()):
        held_out = epoch.get("val_accuracy")
        accuracy = epoch.get("train_accuracy") if held_out is None else held_out
        loss = epoch.get("loss")
        if accuracy is not None and loss is not None:
            points.append(EpochPoint(place + 1, loss, accuracy))
    return points
