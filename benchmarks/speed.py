"""What masks cost in time: learning, switching, inference, with competitors in the same run.

    python benchmarks/speed.py --out results/speed.json    # about 8 minutes on two free cores
    python benchmarks/speed.py --device cuda --out FILE    # the same on a GPU
    python benchmarks/speed.py --table results/speed.json  # print it again, beside the goals
    python benchmarks/speed.py --table results/speed.json --figure docs/assets/speed.svg
    python tools/speed_table.py                            # put the tables into docs/speed.md

Every result is a ratio between things that ran in turn, round by round: the median of the rounds and
their quartiles. "Again" is the same thing timed twice, and shows the resolution of the clock. The
network is ResNet-50 with random weights (23,454,912 masked weights in 53 layers).

polymask does not depend on PEFT, which is skipped if it is not installed. In an environment that
has it (see compare_peft.py), `--only step --out results/speed.json` measures that part again and
leaves the others as they are.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from cost.learning import settings, small_step, step, transform
from cost.network import NETWORK
from cost.report import figure, tables
from cost.timing import Clock
from cost.using import inference, show, switch

PACKAGES = ("polymask", "torch", "torchvision", "timm", "peft")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write what is measured")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--table", type=Path, help="print what was measured before")
    parser.add_argument("--figure", type=Path, help="draw it")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="rounds of whole training steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="where: cpu, cuda, …")
    options = parser.parse_args()
    results = json.loads(options.table.read_text()) if options.table is not None else measure(options)
    if options.figure is not None:
        options.figure.parent.mkdir(parents=True, exist_ok=True)
        options.figure.write_text(figure(results))
    if options.json:
        print(json.dumps(results, indent=1))
    elif options.table is not None or set(options.only) == set(PARTS):
        print(tables(results, others(options.table or options.out)))
    else:
        print(json.dumps({part: results[part] for part in options.only}, indent=1))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every requested part; keep what an earlier run wrote to the file."""
    clock = Clock(options.threads, options.device)
    before = {}
    if options.out is not None and options.out.exists():
        before = json.loads(options.out.read_text())
    results = before | {
        "setup": {
            "network": NETWORK,
            "clock": clock.name,
            "threads": options.threads,
            "device": options.device,
            "python": platform.python_version(),
            "versions": before.get("setup", {}).get("versions", {})
            | {name: v for name in PACKAGES if (v := installed(name))},
        }
    }
    for part in options.only:
        begin = time.perf_counter()
        torch.manual_seed(0)
        results[part] = PARTS[part](clock, options.steps if "step" in part else options.rounds)
        print(f"{part}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    return results


def others(path: Path | None) -> dict[str, Any]:
    """The results that the other scripts wrote next to this one: memory, scale, data, the demo and cold domains."""
    folder = path.parent if path is not None else Path("results")
    files = {name: folder / f"{name}.json" for name in ("memory", "scale", "data", "demo", "cold")}
    return {name: json.loads(f.read_text()) for name, f in files.items() if f.exists()}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


PARTS: dict[str, Callable[[Clock, int], dict[str, Any]]] = {
    "transform": transform,
    "switch": switch,
    "inference": inference,
    "step": step,
    "small step": small_step,
    "settings": settings,
    "show": show,
}


if __name__ == "__main__":
    main()
