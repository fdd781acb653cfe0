"""What a domain that is not in memory costs: from its pack to the logits of one image, against one that is.

    python benchmarks/cold.py --out results/cold.json    # two minutes

Packs lie in the page cache. A hit runs one of twelve networks that are kept, in turn, as a server does, so that weights
come from memory and not from the processor's cache; a miss reads a pack into the network of the one that has to go, and
runs that. Both in one thread, in turn, in CPU seconds; the median of the rounds. Masks are random with the density that
learned ones have, so that they are coded as those are: one half by affine-centred, the default, whose masks are stored
bit by bit; 0.36 by affine-full, as in the demo when it was that method's, where decoding takes its time too.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cost.timing import Clock
from load.packs import METHODS, as_learned

import polymask as pm
from polymask.library.cache import MergedCache, Source
from polymask.methods.affine.formula import set_kernels
from polymask.pack.storing import OpenPack

BASES = ("efficientnet-lite0", "resnet18-64")
PACKS, KEPT = 12, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--kernels", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    clock = Clock(1)
    found: dict[str, Any] = {"clock": clock.name, "torch": torch.__version__, "rounds": options.rounds, "bases": {}}
    for name in BASES:
        found["bases"][name] = rows = {}
        for method in METHODS:
            for kind in options.kernels:
                set_kernels(kind)
                rows[f"{method}, {kind}"] = one = measured(name, method, clock, options.rounds)
                print(name, method, kind, json.dumps(one), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


@torch.no_grad()
def measured(name: str, method: str, clock: Clock, rounds: int) -> dict[str, float]:
    """Milliseconds of a hit, of a miss and of its parts."""
    base = pm.load_base(name, pretrained=False)
    image = torch.randn(1, *base.input.shape)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_packs(base, method, Path(folder))
        sources = [Source.of(path, base) for path in paths]
        warm = MergedCache(base, 1 << 40)
        cold = MergedCache(base, 1 << 40)

        def run(cache: MergedCache, place: int) -> torch.Tensor:
            with cache.use(str(place), sources[place]) as net:
                return net(image)

        def merge(place: int) -> None:
            with cold.use(str(place), sources[place]):
                pass

        for place in range(PACKS):
            run(warm, place)
        cold.budget_bytes = KEPT * warm.stats.bytes // PACKS + 1000
        calls = {
            "hit": lambda place: run(warm, place),
            "miss": lambda place: run(cold, place),
            "miss without the pass": merge,
            "reading": lambda place: OpenPack.read(paths[place], base),
        }
        seconds: dict[str, list[float]] = {what: [] for what in calls}
        for turn in range(rounds + PACKS):
            for place, (what, call) in enumerate(calls.items()):
                begin = clock.now()
                call((5 * turn + 3 * place) % PACKS)
                seconds[what].append(clock.now() - begin)
        found = {what: round(1000 * median(taken[PACKS:]), 2) for what, taken in seconds.items()}
        size = paths[0].stat().st_size
    return found | {"miss over hit": round(found["miss"] / found["hit"], 3), "pack bytes": size}


def write_packs(base: pm.Base, method: str, folder: Path) -> list[Path]:
    """Packs of different domains, as `learn` writes them; old enough for their sha256 to be checked once."""
    paths = [folder / f"{seed}.safetensors" for seed in range(PACKS)]
    for seed, path in enumerate(paths):
        as_learned(base, 20, method, seed).save(path)
    time.sleep(2.5)
    return paths


if __name__ == "__main__":
    main()
