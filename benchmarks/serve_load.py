"""Load on `polymask serve`, on one machine, compared with the plain PyTorch forward pass.

    python benchmarks/serve_load.py --seconds 600 --out results/serve-load.json    # 19 minutes
    python tools/serve_tables.py                                                  # docs/serve.md

1. One warm domain: images per second through HTTP, as a share of what the bare network does with
   batches of the same size that are already in memory. The two are measured in turn.
2. A thousand domains, requests of one image distributed by Zipf(1.0), a cache of 50 networks: images
   per second, times, hit rate, memory.
3. What of the way from 1. to 2. is not the misses': requests of one image for one warm domain, and by Zipf(1.0) for the
   fifty that are kept.
4. One hot domain, asked for by one client, beside others that ask for domains that are warm too, and beside as many
   that ask for a cold one every time: what the hot one's client waits for.
5. The draws of 2., loading each domain's full checkpoint, without a cache and with one of 50.

The server, its clients and the comparisons share the machine's cores. Domains have random masks and are stored as
`learn` stores them.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, pairwise, repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch
from load.packs import as_learned
from load.requests import form, zipf
from load.rivals import Checkpoints, bare_forward
from load.server import Memory, Server, percentiles

import polymask as pm
from polymask.files import write_atomically
from polymask.library.cache import MergedCache, Source

BASE, CLASSES, WARM = "efficientnet-lite0", 20, 50
ROUNDS = 3


def main() -> None:
    options = read_options()
    base = pm.load_base(BASE)
    found: dict[str, Any] = {"base": BASE, "command": " ".join(["python", *sys.argv])}
    found |= environment()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "library"
        domain, cost = make_library(base, library, options.domains)
        found["pack_bytes"] = (library / "d0000.safetensors").stat().st_size
        found["merged_bytes"] = cost
        if options.many_only:
            found = json.loads(options.out.read_text()) | found
        else:
            found["single_warm_domain"] = single = single_domain(base, domain, library, options)
            show("one warm domain", single)
        found["many_domains"] = many = many_domains(library, options, WARM * cost)
        show(f"{options.domains} domains, Zipf(1.0)", many)
        found["by_one"] = by_one = warm_by_one(library, options, WARM * cost)
        show("warm domains, one image a request", by_one)
        found["hot_domain"] = hot = hot_beside(library, options, WARM * cost)
        show("one hot domain", hot)
        checkpoints = Checkpoints(base, domain, Path(folder))
        found["checkpoint_bytes"] = checkpoints.bytes
        found["full_checkpoints"] = {}
        for kept in (0, WARM):
            seconds = min(options.seconds, 60)
            one = checkpoints.run(options.domains, kept, 4 * kept, seconds)
            one["factor"] = many["images_per_second"] / one["images_per_second"]
            found["full_checkpoints"][str(kept)] = one
            show(f"full checkpoints, the last {kept} kept", one)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out, (json.dumps(found, indent=1) + "\n").encode())


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="of the Zipf load")
    parser.add_argument("--domains", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="images of a request, one domain")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--image-side", type=int, default=256, help="of the JPEGs that are sent")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--many-only", action="store_true", help="leave what the file says of one warm domain")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def environment() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
    }


def make_library(base: pm.Base, folder: Path, count: int) -> tuple[pm.Domain, int]:
    """Make packs d0000, d0001, …; return one of the domains and the bytes of its merged network."""
    folder.mkdir()
    first = folder / "d0000.safetensors"
    as_learned(base, CLASSES).save(first)
    for i in range(1, count):
        shutil.copyfile(first, folder / f"d{i:04}.safetensors")
    cache = MergedCache(base, 1 << 40)
    with cache.use("one", Source.of(first, base)):
        pass
    return pm.load_domain(first, base), cache.stats.bytes


def single_domain(base: pm.Base, domain: pm.Domain, library: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The server and the bare network in turn, `ROUNDS` times."""
    bodies = [form("d0000", options.batch, options.image_side)]
    flags = ["--base", BASE, "--max-batch", str(options.batch), "--workers", str(options.workers)]
    seconds = min(options.seconds, 60) / ROUNDS
    bare, loads = [bare_forward(base, domain, options.batch, seconds / 2)], []
    with Server(library, *flags) as server:
        server.warm_up(bodies, repeat(0), 4 * options.clients, options.clients)
        for _ in range(ROUNDS):
            loads.append(server.load(bodies, lambda seed: repeat(0), options.clients, seconds))
            bare.append(bare_forward(base, domain, options.batch, seconds / 2))
        resident = server.resident()
    served = [options.batch * one.per_second for one in loads]
    # Each round of the server lies between two of the bare network.
    yardsticks = [(before + after) / 2 for before, after in pairwise(bare)]
    shares = [one / yardstick for one, yardstick in zip(served, yardsticks, strict=True)]
    times = [time for one in loads for time in one.times]
    return {
        "batch": options.batch,
        "clients": options.clients,
        "images_per_second": median(served),
        "bare_images_per_second": median(yardsticks),
        "share_of_bare": median(shares),
        "shares_of_rounds": shares,
        **percentiles(times),
        "resident_mb": resident,
    }


def many_domains(library: Path, options: argparse.Namespace, budget: int) -> dict[str, Any]:
    """Requests of one image each, domains drawn by Zipf(1.0)."""
    bodies = [form(f"d{i:04}", 1, options.image_side) for i in range(options.domains)]
    clients = 2 * options.clients
    flags = ["--base", BASE, "--cache-bytes", str(budget), "--workers", str(options.workers)]
    with Server(library, *flags) as server:
        server.warm_up(bodies, zipf(options.domains, seed=9), 4 * WARM, clients)
        before, memory = server.counts(), Memory(server)
        order_of = partial(zipf, options.domains)
        load = server.load(bodies, lambda seed: order_of(seed=100 + seed), clients, options.seconds)
        resident, after = memory.stop(), server.counts()
    hits, misses = (after[name] - before[name] for name in ("hits", "misses"))
    return {
        "seconds": load.seconds,
        "domains": options.domains,
        "clients": clients,
        "cache_networks": WARM,
        "requests": len(load.times),
        "refused": load.refused,
        "images_per_second": load.per_second,
        **percentiles(load.times),
        "hit_rate": hits / (hits + misses),
        "merges": misses,
        **resident,
    }


def warm_by_one(library: Path, options: argparse.Namespace, budget: int) -> dict[str, Any]:
    """Requests of one image each for one domain and for those that are kept, in turn: images per second."""
    bodies = [form(f"d{i:04}", 1, options.image_side) for i in range(WARM)]
    clients, seconds = 2 * options.clients, min(options.seconds, 60) / ROUNDS
    orders = {"one": lambda seed: repeat(0), "kept": lambda seed: zipf(WARM, seed=200 + seed)}
    rates: dict[str, list[float]] = {what: [] for what in orders}
    flags = ["--base", BASE, "--cache-bytes", str(2 * budget), "--workers", str(options.workers)]
    with Server(library, *flags) as server:
        server.warm_up(bodies, cycle(range(WARM)), 2 * WARM, clients)
        before = server.counts()["misses"]
        for what in [*orders] * ROUNDS:
            rates[what].append(server.load(bodies, orders[what], clients, seconds).per_second)
        misses = server.counts()["misses"] - before
    return {"clients": clients, "domains": WARM, "misses": misses} | {w: median(found) for w, found in rates.items()}


def hot_beside(library: Path, options: argparse.Namespace, budget: int) -> dict[str, Any]:
    """What one client waits for that asks for one domain, beside clients of warm domains and of cold ones, in turn."""
    bodies = [form(f"d{i:04}", 1, options.image_side) for i in range(options.domains)]
    others, warm = options.clients - 1, range(1, options.clients)
    beside = {
        "warm": lambda seed: repeat(warm[seed % len(warm)]),
        "cold": lambda seed: cycle(range(WARM + seed, options.domains, others)),
    }
    times: dict[str, list[float]] = {what: [] for what in beside}
    asked: dict[str, int] = dict.fromkeys(beside, 0)
    seconds = min(options.seconds, 60) / ROUNDS
    flags = ["--base", BASE, "--cache-bytes", str(budget), "--workers", str(options.workers)]
    with Server(library, *flags) as server:
        server.warm_up(bodies, cycle(range(WARM)), 2 * WARM, options.clients)
        for what in [*beside] * ROUNDS:
            with ThreadPoolExecutor(1) as aside:
                storm = aside.submit(server.load, bodies, beside[what], others, seconds)
                times[what] += server.load(bodies, lambda seed: repeat(0), 1, seconds).times
                asked[what] += len(storm.result().times)
        misses = server.counts()["misses"]
    found = {f"beside_{what}": percentiles(some) | {"requests": len(some)} for what, some in times.items()}
    return {"others": others, **found, "asked_beside": asked, "misses": misses}


def show(title: str, found: dict[str, Any]) -> None:
    print(title)
    for name, value in found.items():
        text = value if isinstance(value, list | dict) else f"{value:,.3f}".rstrip("0").rstrip(".")
        print(f"  {name.replace('_', ' '):34} {text}", flush=True)


if __name__ == "__main__":
    main()
