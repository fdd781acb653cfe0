"""Write the tables of docs/speed.md from the files of results/ that the scripts wrote.

python tools/speed_table.py [--check]
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from cost.report import tables  # noqa: E402 - it stands beside the scripts
from speed import others  # noqa: E402

PAGE, RESULTS = ROOT / "docs" / "speed.md", ROOT / "results" / "speed.json"
BEGIN, END = "<!-- made by tools/speed_table.py -->", "<!-- end -->"


def main() -> int:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    before, found, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    made = tables(json.loads(RESULTS.read_text()), others(RESULTS))
    text = f"{before}{found}\n\n{made}\n\n{END}{after}"
    if not parser.parse_args().check:
        PAGE.write_text(text)
        return 0
    if PAGE.read_text() == text:
        return 0
    print(f"{PAGE.name} is stale; run python tools/speed_table.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
