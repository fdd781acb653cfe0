"""A capacity plan: what many domains on one base take to store, to serve and to train.

python tools/capacity.py [--domains 1000000 …]

Every assumption is an option. With the defaults it is the plan of docs/scale.md, which
tools/scale_page.py puts there.

Hit rates are those of a cache that drops what was used longest ago, by Che's approximation: with T
the time in which as many different domains are asked for as the cache holds, C = Σ 1 - exp(-p T),
a domain with a share p of the requests is in it with probability 1 - exp(-p T).
"""

import argparse
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

import polymask as pm


@dataclass(frozen=True)
class Assumptions:
    """What the plan starts from; each is an option."""

    domains: int = 1_000_000
    base: str = "torchvision:resnet50"
    method: str = "affine-full"
    classes: int = 200  # of a domain's head
    replicas: int = 3  # of every pack
    zipf: float = 1.0  # the k-th most wanted domain gets k**-zipf of the requests
    requests: float = 1_000.0  # a second
    forward: float = 0.01  # seconds of a device for one image
    memcpy: float = 8e9  # bytes a second
    merge: float = 2.4  # from bits to a merged network, in copies of the network in memory
    disk: float = 500e6  # bytes a second, from where packs are
    memory: float = 256e9  # bytes of a machine for caches
    images: int = 2_000  # to train a domain
    epochs: int = 30
    speed: float = 400.0  # images a second that a device trains
    devices: int = 100
    price: float = 1.0  # of a device's hour


def main() -> None:
    """Print the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Assumptions):
        kind = _count if isinstance(field.default, int) else type(field.default)
        parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    print(plan(Assumptions(**vars(parser.parse_args()))), end="")


def _count(text: str) -> int:
    """A whole number, also as 1e6."""
    return int(float(text))


def plan(a: Assumptions) -> str:
    """The plan as text."""
    base = pm.load_base(a.base, pretrained=False, device="meta")
    bits = pm.account(base, a.method, classes=a.classes).components
    pack = sum(bits.values()) / 8
    network = 4 * sum(t.numel() for t in base.net.state_dict().values())
    lines = [
        f"{a.domains:,} domains by {a.method} on {base.name}, {a.classes} classes each",
        "",
        "storage",
        f"  a pack                  {pack / 1e6:8.2f} MB  ({_parts(bits)})",
        f"  all packs               {a.domains * pack / 1e12:8.2f} TB",
        f"  in {a.replicas} copies             {a.replicas * a.domains * pack / 1e12:8.2f} TB",
        f"  as whole networks       {a.domains * network / 1e12:8.2f} TB  ({network / 1e6:.1f} MB each, in one copy)",
        "",
        f"serving, requests by Zipf({a.zipf:g})",
        "  merged domains held       memory   hits   added to a request, mean   devices",
    ]
    shares = popularity(a.domains, a.zipf)
    merge = a.merge * network / a.memcpy
    miss = merge + pack / a.disk
    for held in (100, 1_000, 10_000, 100_000):
        if held >= a.domains:
            continue
        missed = 1 - hit_rate(shares, held)
        devices = a.requests * (a.forward + missed * merge)
        lines.append(
            f"  {held:19,}   {_bytes(held * network):>9}   {100 * (1 - missed):4.1f} %"
            f"   {1000 * missed * miss:21.1f} ms   {devices:7.1f}"
        )
    fit = int(a.memory // pack)
    packed = 1 - hit_rate(shares, fit) if fit < a.domains else 0.0
    lines += [
        f"  a miss: {1000 * pack / a.disk:.1f} ms to read the pack, {1000 * merge:.1f} ms to merge "
        f"it; {a.requests:g} requests a second, {1000 * a.forward:g} ms each",
        f"  {_bytes(a.memory)} hold {fit:,} packs as they are: {100 * packed:.1f} % of requests then read a disk",
        "",
        "training, every domain once",
        f"  a domain                {a.images * a.epochs / a.speed:8.0f} s of a device  "
        f"({a.images:,} images, {a.epochs} epochs, {a.speed:g} images a second)",
    ]
    hours = a.domains * a.images * a.epochs / a.speed / 3600
    lines += [
        f"  all                     {hours:8,.0f} hours, {hours / a.devices / 24:.1f} days of {a.devices} devices",
        f"  at {a.price:g} an hour           {hours * a.price:8,.0f}",
    ]
    return "\n".join(lines) + "\n"


def popularity(domains: int, exponent: float) -> NDArray[np.float64]:
    """The share of requests that each domain gets, most wanted first."""
    weights = np.arange(1, domains + 1, dtype=np.float64) ** -exponent
    found: NDArray[np.float64] = weights / weights.sum()
    return found


def hit_rate(shares: NDArray[np.float64], held: int) -> float:
    """The share of requests that a cache of `held` domains answers."""
    low, high = 0.0, 1.0
    while _different(shares, high) < held:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _different(shares, middle) < held else (low, middle)
    return float((shares * -np.expm1(-shares * high)).sum())


def _different(shares: NDArray[np.float64], requests: float) -> float:
    """How many different domains so many requests ask for."""
    return float(-np.expm1(-shares * requests).sum())


def _parts(bits: dict[str, int]) -> str:
    sizes = {
        "masks": bits["mask"],
        "norms": bits["norm_affine"] + bits["norm_statistics"],
        "head": bits["head"],
        "rest": bits["scalars"] + bits["bias"] + bits["weights"],
    }
    return ", ".join(f"{name} {size / 8e6:.2f}" for name, size in sizes.items() if size)


def _bytes(count: float) -> str:
    return f"{count / 1e9:,.0f} GB" if count < 1e12 else f"{count / 1e12:,.1f} TB"


if __name__ == "__main__":
    main()
