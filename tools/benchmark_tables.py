"""Write the measured parts of pages of docs/ from results/: the tables that a benchmark prints of what it measured.

python tools/benchmark_tables.py [--check]
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What was measured, its benchmark having the same name, and the page.
PAGES = {
    "unknown": "unknown",
    "extend": "extend",
    "cross": "cross",
    "related": "cross",
    "defaults": "training",
    "demo_epochs": "findings",
    "demo_rates": "findings",
    "demo_seeds": "findings",
    "epochs": "training",
    "first_minutes": "training",
    "head_images": "training",
    "head_start": "training",
    "sizes": "training",
    "test_sizes": "training",
    "convert_library": "convert",
    "trials": "findings",
}

SCRIPTS = {"demo_epochs": "epochs"}  # of results that do not have their benchmark's name


def main() -> int:
    """Write the parts, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [name for name in PAGES if not up_to_date(name, write=not check)]
    for name in stale if check else ():
        print(f"docs/{PAGES[name]}.md is stale; run python tools/benchmark_tables.py", file=sys.stderr)
    return int(check and bool(stale))


def up_to_date(name: str, *, write: bool) -> bool:
    """Whether a page has the tables of its results; with `write` it then has."""
    page = ROOT / "docs" / f"{PAGES[name]}.md"
    text = page.read_text()
    begin, end = f"<!-- {name}: tools/benchmark_tables.py -->\n", f"<!-- end of {name} -->\n"
    before, found, rest = text.partition(begin)
    if not found:
        raise SystemExit(f"{page} has no line {begin.strip()}")
    fresh = before + begin + tables(name) + end + rest.partition(end)[2]
    if write and fresh != text:
        page.write_text(fresh)
    return fresh == text


def tables(name: str) -> str:
    """What the benchmark's --table prints of its results; nothing where there are none."""
    found = ROOT / "results" / f"{name.replace('_', '-')}.json"
    if not found.exists():
        return ""
    command = [sys.executable, ROOT / "benchmarks" / f"{SCRIPTS.get(name, name)}.py", "--table", "--out", found]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
