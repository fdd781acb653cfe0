"""PEFT and polymask on the same three domains, learned one after another on one ResNet-18.

    python benchmarks/compare_peft.py --out results/compare-peft.json    # nine minutes on one core
    python benchmarks/compare_peft.py --out results/compare-peft.json --only step_time
    python benchmarks/compare_peft.py --table results/compare-peft.json    # print it again
    python benchmarks/compare_peft.py --table results/compare-peft.json --page docs/comparison.md

polymask does not depend on PEFT, so measure in a separate environment:

    pip install torch==2.13.0 torchvision==0.28.0 timm==1.0.30 peft==0.21.2 safetensors numpy \
        scikit-learn elpv-dataset matplotlib pillow
    pip install --no-deps -e .

The base is torchvision's ResNet-18 with random weights of a fixed seed at 64 pixels; its batch-norm
statistics come from images of all three domains. Training takes a few steps: enough to see what
moves when the next domain is learned, far too few to compare accuracies. PEFT's heads are copies of
the base's classifier, so the classifier is as wide as that of the largest domain.
"""

import argparse
import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from beside_peft.report import filled, sections

NETWORKS = ("torchvision:resnet18", "torchvision:resnet50", "timm:vit_base_patch16_224")
PACKAGES = ("torch", "torchvision", "timm", "peft", "safetensors", "polymask")
PARTS = ("systems", "class_counts_in_peft", "step_time", "sizes", "grouped_convolutions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write what is measured")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--table", type=Path, help="print what was measured before")
    parser.add_argument("--page", type=Path, help="put it between the markers of this page")
    parser.add_argument("--check", action="store_true", help="raise if the page says otherwise")
    parser.add_argument("--steps", type=int, default=30, help="of training, for each domain")
    parser.add_argument("--rounds", type=int, default=15, help="of timing")
    options = parser.parse_args()
    if (options.out is None) == (options.table is None):
        parser.error("give --out FILE to measure, or --table FILE to print what was measured")
    if options.out is not None:
        measure_parts(options)
    results = json.loads((options.out or options.table).read_text())
    if options.page is None:
        if set(PARTS) <= results.keys():
            print("\n\n".join(sections(results).values()))
        return
    before = options.page.read_text()
    after = filled(before, results)
    if options.check and after != before:
        sys.exit(f"{options.page} is not what the results say; run this again without --check")
    if after != before:
        options.page.write_text(after)


def measure_parts(options: argparse.Namespace) -> None:
    """Measure every requested part; keep the other parts from an earlier run."""
    import torch
    from beside_peft import costs, sequence, setting
    from beside_peft.systems import SYSTEMS

    torch.set_num_threads(1)
    data = setting.load_domains(options.steps)
    net = setting.make_net(data)
    measures = {
        "systems": lambda: {name: sequence.measure(make, net, data) for name, make in SYSTEMS.items()},
        "class_counts_in_peft": lambda: sequence.try_class_counts(net, data),
        "step_time": lambda: {
            "clock": "CPU seconds, one thread",
            "rounds": options.rounds,
            "settings": [costs.time_steps(net, *each, options.rounds) for each in costs.TIMED],
        },
        "sizes": lambda: [costs.sizes(name) for name in NETWORKS],
        "grouped_convolutions": lambda: costs.grouped_convolutions("torchvision:mobilenet_v2"),
    }
    before = json.loads(options.out.read_text()) if options.out.exists() else {}
    results: dict[str, Any] = {
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "setup": {
            "base": "torchvision resnet18, random weights of seed 0",
            "side": setting.SIDE,
            "batch": setting.BATCH,
            "rank": setting.RANK,
            "rates": setting.RATES,
            "steps": options.steps,
            "domains": setting.SOURCES,
        },
    } | {part: before[part] for part in PARTS if part in before}
    if "systems" not in options.only:
        results["setup"] = before.get("setup", results["setup"])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for part in options.only:
        begin = time.perf_counter()
        results[part] = measures[part]()
        print(f"{part}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
