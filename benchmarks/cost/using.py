"""What using domains costs: switching, inference, and looking at a pack."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cost.network import CLASSES, NAMES, NETWORK, SIDE, worn_domain
from cost.timing import Clock, ratios
from torch import nn

import polymask as pm
from polymask.kernels import set_kernels
from polymask.merged_cache import MergedCache
from polymask.merging import WorkingNetwork
from polymask.zoo import build


def switch(clock: Clock, rounds: int) -> dict[str, Any]:
    """One domain after another in the same network, against a copy of its weights."""
    base = pm.load_base(NETWORK, pretrained=False)
    domains = [worn_domain(base, seed).frozen() for seed in (0, 1)]
    working = WorkingNetwork(base)
    for domain in domains:
        working.switch(domain)
    memory = {name: torch.empty(site.shape) for name, site in base.sites.items()}
    source = torch.randn(sum(m.numel() for m in memory.values()))
    target = torch.empty_like(source)
    net, _ = build(NETWORK, pretrained=False)
    net.fc = nn.Linear(2048, CLASSES)
    checkpoints = [{n: t.clone() for n, t in net.state_dict().items()} for _ in (0, 1)]
    turn = iter(range(10**9))

    def weights(kind: str) -> Callable[[], None]:
        def call() -> None:
            set_kernels(kind)
            for name, part in domains[next(turn) % 2].named_transforms():
                part.write(base.tensor(name), memory[name])

        return torch.no_grad()(call)

    def complete(kind: str) -> Callable[[], None]:
        def call() -> None:
            set_kernels(kind)
            working.switch(domains[next(turn) % 2])

        return call

    calls = {
        "memcpy": lambda: target.copy_(source),
        "memcpy again": lambda: target.copy_(source),
        "weights, eager": weights("eager"),
        "weights, compiled": weights("compiled"),
        "complete, eager": complete("eager"),
        "complete, compiled": complete("compiled"),
        "load_state_dict": lambda: net.load_state_dict(checkpoints[next(turn) % 2]),
    }
    seconds = clock.interleaved(calls, rounds)
    set_kernels("eager")
    checked(base, domains, working)
    return {
        "ratios": ratios(seconds, "memcpy"),
        "against_load_state_dict": ratios(seconds, "load_state_dict"),
    }


def checked(base: pm.Base, domains: list[pm.Domain], working: WorkingNetwork) -> None:
    """What was timed gives the domain's own logits."""
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for domain in domains:
            assert torch.equal(working.switch(domain)(images), domain(base, images))


def inference(clock: Clock, rounds: int) -> dict[str, Any]:
    """A merged network, and getting at one that is cached, against the plain network."""
    base = pm.load_base(NETWORK, pretrained=False)
    domain = worn_domain(base).frozen()
    plain = pm.new_domain(base, "classifier-only", NAMES).merged(base)
    cache = MergedCache(base, 1 << 30)
    merged = cache.network("a", domain)
    images = torch.randn(1, 3, SIDE, SIDE)
    calls = {
        "plain": lambda: plain(images),
        "plain again": lambda: plain(images),
        "merged": lambda: merged(images),
        "not merged": lambda: domain(base, images),
        "cached switch": lambda: [cache.network("a", domain) for _ in range(100)],
    }
    with torch.no_grad():
        seconds = clock.interleaved(calls, rounds)
    seconds["cached switch"] = [taken / 100 for taken in seconds["cached switch"]]
    return {"side": SIDE, "batch": 1, "ratios": ratios(seconds, "plain")}


def show(clock: Clock, rounds: int) -> dict[str, Any]:
    """CPU seconds of `polymask show`, in a process of its own; the least of five."""
    base = pm.load_base(NETWORK, pretrained=False)
    code = (
        "import resource, sys; from polymask.cli import main; main(['show', sys.argv[1]]);"
        "used = resource.getrusage(resource.RUSAGE_SELF);"
        "print(used.ru_utime + used.ru_stime, 'torch' in sys.modules, file=sys.stderr)"
    )
    with tempfile.TemporaryDirectory() as folder:
        pack = Path(folder) / "pack.safetensors"
        worn_domain(base).save(pack)
        lines = []
        for _ in range(5):
            run = subprocess.run(
                [sys.executable, "-c", code, str(pack)], capture_output=True, text=True, check=True
            )
            lines.append(run.stderr.split()[-2:])
        size = pack.stat().st_size
    return {
        "pack_bytes": size,
        "cpu_seconds": min(float(seconds) for seconds, _ in lines),
        "imports_torch": any(torch_too == "True" for _, torch_too in lines),
    }
