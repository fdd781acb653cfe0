"""Tables of who is ahead of whom: paired differences, and what they allow one to say."""

from collections.abc import Sequence

from polymask.benchmarks.compare import Comparison
from polymask.report.benchmark_results import HERE
from polymask.report.sheet import NOTHING, Cell, Column, Line, Sheet


def comparison_sheet(name: str, comparisons: Sequence[Comparison]) -> Sheet | None:
    """Every row against one method."""
    if not comparisons:
        return None
    columns = (
        Column("points more"),
        Column("ahead on"),
        Column("seeds"),
        Column("p"),
        Column("so it is", words=True),
    )
    lines = []
    for one in comparisons:
        if one.mean is None:
            lines.append(Line(one.method, (Cell(), Cell(), Cell(), Cell(), Cell(_why(one)))))
            continue
        least, most = one.seeds
        cells = (
            Cell(one.difference, one.interval),
            Cell(f"{one.ahead} of {len(one.by_domain)}"),
            Cell(f"{most}" if least == most else f"{least} to {most}"),
            Cell() if one.p is None else Cell(f"{one.p:.2g}"),
            Cell(_words(one)),
        )
        lines.append(Line(one.method, cells))
    other = comparisons[0].other
    return Sheet(
        f"ahead-{name}",
        f"Against {other}",
        HERE,
        "method",
        columns,
        tuple(lines),
        tuple(_notes(comparisons)),
    )


def _words(one: Comparison) -> str:
    if not one.left_out:
        return one.verdict
    return f"{one.verdict}; without {', '.join(one.left_out)}, where masks did not move"


def _why(one: Comparison) -> str:
    return one.sentence.partition(": ")[2]


def _notes(comparisons: Sequence[Comparison]) -> list[str]:
    notes = [
        "Points of test accuracy that a row has more, paired by domain and seed: the mean over a "
        "domain's seeds, then over domains."
    ]
    over = {one.over for one in comparisons if one.mean is not None}
    if "domains" in over:
        notes.append(
            "± is half of the 95 % t interval over domains. Where it holds 0, the two cannot be "
            "told apart. p: were neither ahead, so often would the mean be as far from 0, over all "
            "choices of the domains' signs; with n domains never below 2 / 2ⁿ."
        )
    if "seeds" in over:
        notes.append(
            "With fewer than three domains ± and p are over seeds, and speak of these domains "
            "alone: another domain may say otherwise."
        )
    if "" in over:
        notes.append(f"Without ±, or with {NOTHING} for p: too few domains and seeds for an interval.")
    told = sum(one.half_width is not None for one in comparisons)
    if told > 1:
        notes.append(
            f"{told} comparisons at 95 % each: were there no differences at all, one in twenty "
            "would still be called one."
        )
    return notes
