"""Bytes that a step of data-parallel training sends, by method.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 benchmarks/gradient_traffic.py \
    --out results/gradient-traffic.json

`given` is what a rank passes to collectives in a step, by purpose; `wire` is what the
loopback interface carried for both ranks (other programs may use it too, so it is a little high).
"""

import argparse
import json
from pathlib import Path

import torch

import polymask as pm
from polymask.train.fit import Listener
from polymask.train.ranks import join_ranks
from polymask.train.recipe import Recipe

STEPS = 6


class Random:
    """Batches of noise: traffic does not depend on their content."""

    def __len__(self) -> int:
        return STEPS

    def batches(self, epoch: int = 0, start: int = 0):
        for step in range(start, STEPS):
            generator = torch.Generator().manual_seed(step)
            yield torch.randn(8, 3, 64, 64, generator=generator), torch.arange(8) % 4


class Meter(Listener):
    """What was sent between the first step and the last."""

    def __init__(self, ranks) -> None:
        self.ranks = ranks

    def step(self, epoch: int, step: int, loss: float, images: int, density: float | None) -> None:
        if step == 1:
            self.before, self.wire_before = dict(self.ranks.bytes_sent), loopback()
        if step == STEPS:
            now = self.ranks.bytes_sent
            steps = STEPS - 1
            self.given = {k: (now[k] - self.before.get(k, 0)) // steps for k in now}
            self.wire = (loopback() - self.wire_before) // steps


def loopback() -> int:
    line = next(s for s in Path("/proc/net/dev").read_text().splitlines() if "lo:" in s)
    return int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", default="efficientnet-lite0")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    base = pm.load_base(given.base)
    recipe = Recipe(epochs=1, selection="last", drops=())
    cases = (  # method, norms, sync_norms, compress
        ("finetune", "own", False, False),
        ("affine-full", "own", False, False),
        ("affine-full", "own", True, False),
        ("affine-full", "own", False, True),
        ("affine-full", "shared", False, False),
        ("parallel-adapter", "own", False, False),
        ("bn-only", "own", False, False),
        ("classifier-only", "shared", False, False),
    )
    with join_ranks() as ranks:
        if ranks is None:
            raise SystemExit(__doc__)
        rows = [measure(base, recipe, ranks, *case) for case in cases]
    if not ranks.first:
        return
    size = sum(p.numel() for p in base.net.parameters())
    content = {"base": base.name, "parameters": size, "ranks": ranks.world, "rows": rows}
    given.out.write_text(json.dumps(content, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))


def measure(base, recipe, ranks, method: str, norms: str, sync: bool, compress: bool) -> dict:
    ranks.sync_norms, ranks.compress = sync, compress
    torch.manual_seed(0)
    domain = pm.new_domain(base, method, ["a", "b", "c", "d"], norms=norms)
    learned = sum(p.numel() for p in domain.parameters() if p.requires_grad)
    meter = Meter(ranks)
    pm.fit(base, domain, Random(), None, recipe, listener=meter, ranks=ranks)
    row = {"method": method, "norms": norms, "sync_norms": sync, "compress": compress}
    sent = {purpose: size for purpose, size in meter.given.items() if size}
    return row | {"learned": learned, "given": sent, "wire": meter.wire}


if __name__ == "__main__":
    main()
