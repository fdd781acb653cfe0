"""What the number of domains costs a `MultiDomainModel`: 1 to 10,000 packs on disk, and memory.

    python benchmarks/scale.py --out results/scale.json    # about a minute on two free cores
    python benchmarks/scale.py --table results/scale.json  # print it again
    python tools/speed_table.py                            # docs/speed.md

Each size runs in its own process: a model takes up a library of that many packs; up to 100 of its domains, evenly
spread, are called for the first time, so that each is read and its network merged; the last one is called again; then
ten domains more are added. Times are CPU seconds of one thread for one domain, after a round of everything that is not
timed. Memory is what becomes resident (Linux) from taking up the library to the last call, beside the networks that the
cache holds. The C library is told to return large blocks at once, so that this is memory in use. The network has random
weights. Ten packs are made, and all others are links to them: they are in the page cache, and a library of 10,000 on
a cold disk would wait for that.
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

SIZES = (1, 100, 10_000)
DISTINCT = 10
BUDGET = 300 << 20  # three merged networks
SIDE = 64
CALLED = 100  # domains at the most, for the first time
ADDED = 10
VERBS = ("load", "call", "warm_call", "add")
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
            domain = worn_domain(base, seed)
            domain.input = domain.input.at(SIDE)
            domain.save(packs / f"{seed}.safetensors")
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
    """Seconds of each verb for one domain, and memory beside what networks hold."""
    base = make_base()
    domains = [pm.load_domain(packs / f"{seed}.safetensors", base) for seed in range(ADDED)]
    with tempfile.TemporaryDirectory(dir=packs) as folder:
        library = Path(folder)
        put_links(packs, library, 1)
        use(base, library, domains)  # imports, and memory allocated at first use
        put_links(packs, library, size)
        gc.collect()
        before = resident()
        model, seconds = use(base, library, domains)
        gc.collect()
        held = resident() - before
    row = {"domains": size, "resident_bytes": held, "cache_bytes": model.cache_stats.bytes}
    return row | {f"{verb}_seconds": round(seconds[verb], 6) for verb in VERBS}


def use(base: pm.Base, library: Path, domains: list[pm.Domain]) -> tuple[pm.MultiDomainModel, dict[str, float]]:
    """Take up a library, call some of its domains, the last one twice, add some; CPU seconds for one domain."""
    images = torch.randn(1, 3, SIDE, SIDE)
    model = pm.MultiDomainModel(base, cache_bytes=BUDGET)
    seconds = {"load": seconds_of(lambda: model.load_library(library)) / len(list(library.iterdir()))}
    names = model.domains[:: max(1, len(model.domains) // CALLED)][:CALLED]
    seconds["call"] = seconds_of(lambda: [model(images, domain=name) for name in names]) / len(names)
    seconds["warm_call"] = seconds_of(lambda: model(images, domain=names[-1]))
    seconds["add"] = seconds_of(lambda: add_all(model, domains)) / len(domains)
    return model, seconds


def add_all(model: pm.MultiDomainModel, domains: list[pm.Domain]) -> None:
    for number, domain in enumerate(domains):
        model.add(f"more{number}", domain)
    for number in range(len(domains)):  # so that what they hold is not counted
        model.remove(f"more{number}")


def put_links(packs: Path, library: Path, size: int) -> None:
    """Fill a library up to this many packs; existing ones stay."""
    for number in range(len(list(library.iterdir())), size):
        os.link(packs / f"{number % DISTINCT}.safetensors", library / f"{number}.safetensors")


def seconds_of(call: Callable[[], object]) -> float:
    gc.collect()  # or a call pays for the garbage of those before it
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
        f"{setup['cache_bytes'] / 1e6:.0f} MB; {setup['clock']}, for one domain:"
    )
    rows = [["domains on disk", "take up, ms", "first call, ms", "next call, ms", "add, ms", "MB", "of it networks"]]
    for row in results["sizes"]:
        times = [f"{1e3 * row[f'{verb}_seconds']:.1f}" for verb in VERBS]
        memory = [f"{row[f'{what}_bytes'] / 1e6:.0f}" for what in ("resident", "cache")]
        rows.append([f"{row['domains']:,}", *times, *memory])
    return f"{head}\n\n{markdown(rows)}"


if __name__ == "__main__":
    main()
