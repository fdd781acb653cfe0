"""What the number of domains costs: adding, loading and calling 1 to 1,000 of them, and memory.

    python benchmarks/scale.py --out results/scale.json    # about 5 minutes on two free cores
    python benchmarks/scale.py --table results/scale.json  # print it again

Each size runs in its own process: `MultiDomainModel` loads a library of that many packs, every
domain is called once (so its network is merged first), then the last one again; then the same number
of domains is added to another model. Times are CPU seconds of one thread, divided by the number of
domains; small sizes are repeated. Memory is what becomes resident (Linux) from loading to the
last call, next to what is expected: the bytes of the packs and of the merged networks that the
cache holds. The C library is told to return large blocks at once, so that this is memory in use.
The network has random weights. Ten packs are made and all others are links to them, but each
domain is still loaded into its own memory.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cost.network import NETWORK, worn_domain
from cost.timing import markdown

import polymask as pm

SIZES = (1, 10, 100, 1000)
DISTINCT = 10
BUDGET = 300 << 20  # three merged networks
SIDE = 64
LEAST = 10  # a time covers at least this many domains
STATUS = Path("/proc/self/status")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write what is measured")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--table", type=Path, help="print what was measured before")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--packs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.size is not None:
        print(json.dumps(measure(options.packs, options.size)))
        return
    results = json.loads(options.table.read_text()) if options.table is not None else measure_all(options.sizes)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1) if options.json else table(results))


def measure_all(sizes: list[int]) -> dict[str, Any]:
    """Measure every size, each in its own process."""
    base = make_base()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        packs = Path(folder)
        for seed in range(DISTINCT):
            worn_domain(base, seed).save(packs / f"{seed}.safetensors")
        for size in sizes:
            begin = time.perf_counter()
            words = ["--size", str(size), "--packs", folder]
            run = subprocess.run(
                [sys.executable, __file__, *words],
                env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            rows.append(json.loads(run.stdout.splitlines()[-1]))
            print(f"{size}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        pack_bytes = (packs / "0.safetensors").stat().st_size
    return {
        "setup": {
            "network": NETWORK,
            "side": SIDE,
            "cache_bytes": BUDGET,
            "pack_bytes": pack_bytes,
            "clock": "CPU seconds, one thread",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "polymask": pm.__version__,
        },
        "sizes": rows,
    }


def make_base() -> pm.Base:
    """The same base in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return pm.load_base(NETWORK, pretrained=False)


def measure(packs: Path, size: int) -> dict[str, Any]:
    """Seconds per domain of each verb, and resident against expected memory."""
    base = make_base()
    with tempfile.TemporaryDirectory(dir=packs) as folder:
        library = Path(folder)
        put_links(packs, library, 1)
        use(base, library)  # imports, and memory allocated at first use
        put_links(packs, library, size)
        gc.collect()
        before = resident()
        model, seconds = use(base, library)
        gc.collect()
        held = resident() - before
        expected = sum(f.stat().st_size for f in library.iterdir()) + model.cache_stats.bytes
        del model
        turns = [seconds]
        turns += [use(base, library)[1] for _ in range(-(-LEAST // size) - 1)]
    domains = [pm.load_domain(packs / f"{seed}.safetensors", base) for seed in range(DISTINCT)]
    for turn in turns:
        turn["add"] = seconds_of(lambda: add_all(base, domains, size))
    row = {"domains": size, "resident_bytes": held, "expected_bytes": expected}
    for verb in ("add", "load", "call"):
        row[f"{verb}_seconds"] = round(sum(t[verb] for t in turns) / len(turns) / size, 5)
    row["warm_call_seconds"] = round(min(t["warm_call"] for t in turns), 5)
    return row


def use(base: pm.Base, library: Path) -> tuple[pm.MultiDomainModel, dict[str, float]]:
    """Load a library and call every domain, the last one twice; return the CPU seconds of each."""
    images = torch.randn(1, 3, SIDE, SIDE)
    model = pm.MultiDomainModel(base, cache_bytes=BUDGET)
    seconds = {"load": seconds_of(lambda: model.load_library(library))}
    names = model.domains
    seconds["call"] = seconds_of(lambda: [model(images, domain=name) for name in names])
    seconds["warm_call"] = seconds_of(lambda: model(images, domain=names[-1]))
    return model, seconds


def add_all(base: pm.Base, domains: list[pm.Domain], size: int) -> None:
    model = pm.MultiDomainModel(base, cache_bytes=BUDGET)
    for number in range(size):
        model.add(f"{number}", domains[number % DISTINCT])


def put_links(packs: Path, library: Path, size: int) -> None:
    """Fill a library up to this many packs; existing ones stay."""
    for number in range(len(list(library.iterdir())), size):
        os.link(packs / f"{number % DISTINCT}.safetensors", library / f"{number}.safetensors")


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def resident() -> int:
    """Bytes of this process that are in memory now."""
    rows = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return 1024 * int(rows["VmRSS"].split()[0])


def table(results: dict[str, Any]) -> str:
    """Milliseconds per domain, and memory."""
    setup = results["setup"]
    head = (
        f"{setup['network']}, packs of {setup['pack_bytes'] / 1e6:.2f} MB, a cache of "
        f"{setup['cache_bytes'] / 1e6:.0f} MB; {setup['clock']}"
    )
    rows = [["domains", "add, ms", "load, ms", "first call, ms", "next call, ms", "MB", "expected"]]
    for row in results["sizes"]:
        times = [f"{1e3 * row[f'{verb}_seconds']:.1f}" for verb in VERBS]
        memory = [f"{row[f'{what}_bytes'] / 1e6:.0f}" for what in ("resident", "expected")]
        rows.append([f"{row['domains']:,}", *times, *memory])
    return f"{head}\n\n{markdown(rows)}"


VERBS = ("add", "load", "call", "warm_call")


if __name__ == "__main__":
    main()
