"""What using domains costs: switching, inference, and inspecting a pack."""

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
from polymask.core.merge import WorkingNetwork
from polymask.library.cache import MergedCache
from polymask.methods.affine.formula import set_kernels
from polymask.nets.zoo import build

KINDS = ("compiled", "eager")
DOMAINS = 4  # in one batch


def switch(clock: Clock, rounds: int) -> dict[str, Any]:
    """One domain after another in the same network, against a copy of its weights.

    "weights" and "complete" are what `MultiDomainModel` does if it has memory for only one network,
    "cold merge" what it does for a network that is not in its full cache.
    """
    base = pm.load_base(NETWORK, pretrained=False)
    domains = [worn_domain(base, seed).frozen() for seed in (0, 1)]
    working, cache = WorkingNetwork(base), full_cache(base, domains[0])
    source = torch.randn(sum(site.numel for site in base.sites.values()))
    target = torch.empty_like(source)
    net, _ = build(NETWORK, pretrained=False)
    net.fc = nn.Linear(2048, CLASSES)
    checkpoints = [{n: t.clone() for n, t in net.state_dict().items()} for _ in (0, 1)]
    turn = iter(range(10**9))

    def by(kind: str, do: Callable[[pm.Domain], object]) -> Callable[[], None]:
        def call() -> None:
            set_kernels(kind)
            do(domains[next(turn) % 2])

        return torch.no_grad()(call)

    ways = {
        "weights": working.write,
        "complete": working.switch,
        "cold merge": lambda domain: took(cache, "y" if "x" in cache else "x", domain),
    }
    calls = {
        "memcpy": lambda: target.copy_(source),
        "memcpy again": lambda: target.copy_(source),
        "load_state_dict": lambda: net.load_state_dict(checkpoints[next(turn) % 2]),
    } | {f"{way}, {kind}": by(kind, do) for way, do in ways.items() for kind in KINDS}
    seconds = clock.interleaved(calls, rounds, warm_up=2)
    for kind in KINDS:
        set_kernels(kind)
        checked(base, domains, working)
    set_kernels("eager")
    return {
        "ratios": ratios(seconds, "memcpy"),
        "against_load_state_dict": ratios(seconds, "load_state_dict"),
    }


def full_cache(base: pm.Base, domain: pm.Domain) -> MergedCache:
    """A cache that holds one network and has no room for another."""
    cache = MergedCache(base, 1 << 40)
    took(cache, "x", domain)
    cache.budget_bytes = cache.stats.bytes
    return cache


def took(cache: MergedCache, name: str, domain: pm.Domain) -> None:
    """Fetch a network from a cache and do nothing with it."""
    with cache.use(name, domain):
        pass


def checked(base: pm.Base, domains: list[pm.Domain], working: WorkingNetwork) -> None:
    """Check that what was timed gives the domain's own logits."""
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for domain in domains:
            assert torch.equal(working.switch(domain)(images), domain(base, images))


def inference(clock: Clock, rounds: int) -> dict[str, Any]:
    """A merged network, and fetching a cached one, against the plain network."""
    base = pm.load_base(NETWORK, pretrained=False)
    domain = worn_domain(base).frozen()
    plain = pm.new_domain(base, "classifier-only", NAMES).merged(base)
    cache = MergedCache(base, 1 << 30)
    with cache.use("x", domain) as kept:
        merged = kept  # nothing evicts it
    images = torch.randn(1, 3, SIDE, SIDE)
    calls = {
        "plain": lambda: plain(images),
        "plain again": lambda: plain(images),
        "merged": lambda: merged(images),
        "not merged": lambda: domain(base, images),
        "cached switch": lambda: [took(cache, "x", domain) for _ in range(100)],
    }
    with torch.no_grad():
        seconds = clock.interleaved(calls, rounds)
    seconds["cached switch"] = [taken / 100 for taken in seconds["cached switch"]]
    return {
        "side": SIDE,
        "batch": 1,
        "ratios": ratios(seconds, "plain"),
        "mixed": mixed(clock, rounds, base, plain),
    }


def mixed(clock: Clock, rounds: int, base: pm.Base, plain: nn.Module) -> dict[str, Any]:
    """A batch of several domains, against the plain network on as many batches."""
    model = pm.MultiDomainModel(base)
    for seed in range(DOMAINS):
        model.add(f"d{seed}", worn_domain(base, seed))
    images = torch.randn(2 * DOMAINS, 3, SIDE, SIDE)
    names = [f"d{row % DOMAINS}" for row in range(len(images))]
    parts = [images[row::DOMAINS].contiguous() for row in range(DOMAINS)]
    calls = {
        "plain": lambda: [plain(part) for part in parts],
        "plain again": lambda: [plain(part) for part in parts],
        "mixed batch": lambda: model(images, domain=names),
    }
    with torch.no_grad():
        found = ratios(clock.interleaved(calls, rounds), "plain")
    return {"domains": DOMAINS, "images": len(images), "ratios": found}


def show(clock: Clock, rounds: int) -> dict[str, Any]:
    """CPU seconds of `polymask show` in its own process; the least of five."""
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
            run = subprocess.run([sys.executable, "-c", code, str(pack)], capture_output=True, text=True, check=True)
            lines.append(run.stderr.split()[-2:])
        size = pack.stat().st_size
    return {
        "pack_bytes": size,
        "cpu_seconds": min(float(seconds) for seconds, _ in lines),
        "imports_torch": any(torch_too == "True" for _, torch_too in lines),
    }
