"""Write the tables and sentences of docs/findings.md from the runs in results/.

The page says what it wants between comments, and this fills it in:

    <!-- table results/RUNS -->                      every row: protocol, bits moved, accuracies
    <!-- search results/RUNS -->                     what each value of the search reached on val
    <!-- compare results/A results/B: x,y; x,z -->   a sentence for each pair, over all domains
    <!-- end -->

python tools/findings_page.py [--check]
"""

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from polymask.benchmarks.compare import compare_pooled
from polymask.benchmarks.records import read_runs
from polymask.benchmarks.tables import ResultRow, ResultTable, Statistic, settings_text, tabulate
from polymask.train.recipe import write_value

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "findings.md"
_BLOCK = re.compile(r"(<!-- (table|search|compare) (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = _BLOCK.sub(lambda m: f"{m[1]}\n{filled(m[2], m[3])}\n\n{m[4]}", PAGE.read_text())
    if not parser.parse_args().check:
        PAGE.write_text(text)
        return 0
    if PAGE.read_text() == text:
        return 0
    print(f"{PAGE.name} is stale; run python tools/findings_page.py", file=sys.stderr)
    return 1


def filled(kind: str, words: str) -> str:
    """What stands between a comment and its end."""
    if kind == "compare":
        folders, _, pairs = words.partition(":")
        found = [pair.strip().split(",") for pair in pairs.split(";")]
        places = [ROOT / folder for folder in folders.split()]
        return "\n".join(f"* {compare_pooled(places, a, b).sentence}." for a, b in found)
    table = tabulate(read_runs(ROOT / words))
    return results(table) if kind == "table" else searches(table)


def results(table: ResultTable) -> str:
    """A row for each method, the best mean first."""
    domains = list(table.plan.domains)
    heading = ["method", "chosen on val", "seeds", "bits moved", *domains, "mean", "#Params"]
    rows = sorted(table.rows, key=lambda row: -(row.mean or 0.0))
    return grid(heading, [_cells(table, row, domains) for row in rows if row.outcomes])


def _cells(table: ResultTable, row: ResultRow, domains: list[str]) -> list[str]:
    arrow = {"down": " ↓", "up": " ↑"}.get(row.direction, "")
    moved = row.moved
    return [
        f"`{row.method}`{arrow}{' ‡' if row.still else ''}",
        settings_text(table.plan.chosen(row.method)) or "–",
        str(len(row.seeds)),
        "–" if moved is None else f"{100 * moved.share:.2g} %",
        *(_accuracy(row.accuracy[domain]) for domain in domains),
        "–" if row.mean is None else f"{row.mean:.1f}",
        "–" if row.params is None else f"{row.params:.2f}",
    ]


def _accuracy(one: Statistic | None) -> str:
    if one is None:
        return "–"
    return f"{one.mean:.1f}" if one.sd is None else f"{one.mean:.1f} ± {one.sd:.1f}"


def searches(table: ResultTable) -> str:
    """Every value that was tried, with the mean accuracy on val; the chosen one in bold."""
    rows = []
    for method, tuned in table.plan.tuning.items():
        chosen = dict(tuned.chosen)
        for_each = [
            f"{'**' if dict(trial.values) == chosen else ''}"
            f"{', '.join(write_value(v) for v in trial.values.values())}: "
            f"{'not finite' if trial.mean is None else f'{trial.mean:.1f}'}"
            f"{'**' if dict(trial.values) == chosen else ''}"
            for trial in tuned.trials
        ]
        if for_each:
            rows.append([f"`{method}`", ", ".join(tuned.fields), " · ".join(for_each)])
    return grid(["method", "field", "value: accuracy on val, %"], rows)


def grid(heading: list[str], rows: Iterable[list[str]]) -> str:
    """A table in Markdown."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
