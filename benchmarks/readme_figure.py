"""The figure of the README, from the result of a demo.

polymask demo && cp demo/result.json results/demo.json
python benchmarks/readme_figure.py results/demo.json docs/assets/size-against-accuracy.svg
"""

import json
import sys
from pathlib import Path

from polymask.report.demo_page import DemoResult, size_against_accuracy

source, target = map(Path, sys.argv[1:])
result = DemoResult.from_json(json.loads(source.read_text()))
target.parent.mkdir(parents=True, exist_ok=True)
target.write_text(size_against_accuracy(result.domains, name="readme"))
