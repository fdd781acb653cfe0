"""Write what docs/scale.md has from elsewhere: two results, and the plan of tools/capacity.py.

python tools/scale_page.py [--check]
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path
from statistics import median
from typing import Any

from capacity import Assumptions, plan

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"
OPTIONS = {"sync_norms": "`--sync-norms`", "compress": "`--compress-gradients`"}


def main() -> int:
    """Write the parts, or with --check say whether the page has them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    before = PAGE.read_text()
    page = before
    for name, text in parts().items():
        page = filled(page, name, text)
    if not check:
        PAGE.write_text(page)
    elif page != before:
        print("docs/scale.md is stale; run python tools/scale_page.py", file=sys.stderr)
        return 1
    return 0


def parts() -> dict[str, str]:
    """The text of every part, by the name in its marks."""
    return {
        "ray overhead": overhead(_result("ray-overhead.json")),
        "gradient traffic": traffic(_result("gradient-traffic.json")),
        "capacity": f"```text\n{plan(Assumptions())}```\n",
    }


def filled(page: str, name: str, text: str) -> str:
    """The page with another text between the marks of a part."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    start, stop = page.index(begin) + len(begin), page.index(end)
    return page[:start] + text + page[stop:]


def overhead(found: dict[str, Any]) -> str:
    """What Ray costs, in a paragraph."""
    local, ray = (median(found["seconds"][engine]) for engine in ("local", "ray"))
    more = 100 * (ray / local - 1)
    text = (
        f"What it costs: {found['jobs']} jobs of {found['seconds of a job']['local']:.0f} s took "
        f"{local:.1f} s by `--workers {found['workers']}` and {ray:.1f} s by a Ray of its own that "
        f"does as many at a time, {abs(more):.1f} % {'more' if more >= 0 else 'less'}. Starting "
        f"and ending both is in these times, medians of {len(found['seconds']['ray'])}; the same "
        f"command again took {_range(found['seconds']['local'])} and "
        f"{_range(found['seconds']['ray'])} (`benchmarks/ray_overhead.py --repeats "
        f"{len(found['seconds']['ray'])}`, results/ray-overhead.json)."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


def _range(seconds: list[float]) -> str:
    return f"{min(seconds):.0f} to {max(seconds):.0f} s"


def traffic(found: dict[str, Any]) -> str:
    """Bytes of a step by method, as a table."""
    lines = [
        "| method | norms | options | numbers that learn | gradients, bytes | norms and counts | "
        "loopback, both processes |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        given = row["given"]
        options = " ".join(text for name, text in OPTIONS.items() if row[name])
        rest = given.get("norms", 0) + given["counts"]
        lines.append(
            f"| `{row['method']}` | {row['norms']} | {options} | {row['learned']:,} | "
            f"{given['gradients']:,} | {rest:,} | {row['wire']:,} |"
        )
    return "\n".join(lines) + "\n"


def _result(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "results" / name).read_text())
    return content


if __name__ == "__main__":
    sys.exit(main())
