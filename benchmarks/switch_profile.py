"""Where the time of a complete switch goes, by operation; ResNet-50, one thread.

    python benchmarks/switch_profile.py --out results/switch-profile.json    # ten seconds

`load_state_dict`, the competitor, copies every tensor once; the operations of a switch are listed next to it.
"""

import argparse
import cProfile
import json
import pstats
from pathlib import Path
from typing import Any

import torch
from cost.network import NETWORK, worn_domain

import polymask as pm
from polymask.core.merge import WorkingNetwork
from polymask.methods.affine.formula import set_kernels

SWITCHES, SHOWN = 20, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    base = pm.load_base(NETWORK, pretrained=False)
    domains = [worn_domain(base, seed).frozen() for seed in (0, 1)]
    found = {kind: profile(base, domains, kind) for kind in ("compiled", "eager")}
    out.write_text(json.dumps({"switches": SWITCHES, "milliseconds": found}, indent=1) + "\n")
    for kind, rows in found.items():
        print(kind, "; ".join(f"{name} {spent:.1f}" for name, spent in rows.items()))


def profile(base: pm.Base, domains: list[pm.Domain], kind: str) -> dict[str, Any]:
    """Milliseconds of a switch by function, largest first; the rest is one row."""
    set_kernels(kind)
    working = WorkingNetwork(base)
    for domain in domains:
        working.switch(domain)
    profiler = cProfile.Profile()
    for turn in range(SWITCHES):
        profiler.enable()
        working.switch(domains[turn % 2])
        profiler.disable()
    spent: dict[str, float] = {}
    for (_, _, name), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():
        short = "the compiled kernel" if name.endswith("kernel.kernel>") else name
        short = short.removeprefix("<built-in method ").removeprefix("<method ").rstrip(">")
        short = short.split("' of ")[0].strip("'")
        spent[short] = spent.get(short, 0.0) + 1000 * own / SWITCHES
    largest = sorted(spent, key=spent.__getitem__, reverse=True)
    rows = {name: round(spent[name], 2) for name in largest[:SHOWN]}
    return rows | {"all else": round(sum(spent[name] for name in largest[SHOWN:]), 2)}


if __name__ == "__main__":
    main()
