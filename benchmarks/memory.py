"""What masks cost in memory: training steps and inference of ResNet-50, each in its own process.

    python benchmarks/memory.py --out results/memory.json    # about 3 minutes on two free cores
    python benchmarks/memory.py --table results/memory.json  # print it again

The measure is resident memory (Linux): the peak from the second step on, minus what was
resident before the network was made, so neither imports nor the compiler's own work count. The C
library is told to return large blocks at once, so the peak is that of memory in use. Training
uses fused Adam. "again" is the same thing measured twice, and shows the resolution. The
network has random weights.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cost.learning import stepper
from cost.network import CLASSES, NAMES, NETWORK, worn_domain
from cost.rivals import NaiveMasks, lora, piggyback
from cost.timing import markdown
from torch import nn

import polymask as pm
from polymask.methods.affine.formula import set_kernels
from polymask.nets.zoo import build

GOAL = 9  # bytes per masked weight, above fine-tuning
STEPS = 3
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write what is measured")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--table", type=Path, help="print what was measured before")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1, help="processes for each; least counts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variant", choices=[*TRAINING, *INFERENCE], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant is not None:
        print(measure(options))
        return
    results = json.loads(options.table.read_text()) if options.table is not None else measure_all(options)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1) if options.json else tables(results))


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every variant in its own processes, in turn."""
    peaks: dict[str, int] = {}
    for turn in range(options.repeats):
        for name in [*TRAINING, *INFERENCE]:
            found = in_process(name, options)
            if found is None:
                continue
            peaks[name] = min(found, peaks.get(name, found))
            print(f"{turn + 1}: {name}: {found / 1e6:.0f} MB", file=sys.stderr, flush=True)
    base = pm.load_base(NETWORK, pretrained=False, device="meta")
    weights = sum(site.numel for site in base.sites.values())

    def over(names: dict[str, Any], unit: str) -> dict[str, float]:
        known = [name for name in names if name in peaks]
        return {name: round((peaks[name] - peaks[unit]) / weights, 2) for name in known}

    return {
        "setup": {
            "network": NETWORK,
            "side": options.side,
            "batch": options.batch,
            "steps": STEPS,
            "repeats": options.repeats,
            "threads": options.threads,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "polymask": pm.__version__,
        },
        "masked_weights": weights,
        "peak_bytes": peaks,
        "bytes_per_weight_over_finetune": over(TRAINING, "fine-tuning"),
        "bytes_per_weight_over_plain_inference": over(INFERENCE, "plain network"),
    }


def in_process(name: str, options: argparse.Namespace) -> int | None:
    """The peak of one variant; None if it cannot be measured here."""
    words = ["--variant", name, "--side", options.side, "--batch", options.batch]
    words += ["--threads", options.threads]
    run = subprocess.run(
        [sys.executable, __file__, *map(str, words)],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    last = run.stdout.split()[-1]
    return None if last == "None" else int(last)


def measure(options: argparse.Namespace) -> int | None:
    """The peak resident memory of a variant, minus what was resident before its network."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    name = options.variant
    set_kernels("compiled" if name.endswith("compiled") else "eager")
    images = torch.randn(options.batch, 3, options.side, options.side)
    images = images.contiguous(memory_format=torch.channels_last)
    gc.collect()
    before = resident("VmRSS")
    run = TRAINING[name]() if name in TRAINING else INFERENCE[name]()
    if run is None:
        return None
    labels = torch.arange(options.batch) % CLASSES
    run(images, labels)
    gc.collect()
    CLEAR.write_text("5")  # the peak is counted from here on
    for _ in range(STEPS - 1):
        run(images, labels)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of this process that are in memory now (VmRSS), or were at most (VmHWM)."""
    rows = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return 1024 * int(rows[field].split()[0])


Run = Callable[[torch.Tensor, torch.Tensor], None]


def fine_tuning() -> Run:
    net, _ = build(NETWORK, pretrained=False)
    net.fc = nn.Linear(2048, CLASSES)
    return stepper(net)


def masks() -> Run:
    base = pm.load_base(NETWORK, pretrained=False)
    return stepper(pm.DomainModel(base, pm.new_domain(base, "affine-full", NAMES)))


def naive() -> Run:
    return stepper(NaiveMasks(pm.load_base(NETWORK, pretrained=False), CLASSES))


def literal_piggyback() -> Run:
    net, _ = build(NETWORK, pretrained=False)
    return stepper(piggyback(net, CLASSES))


def low_rank() -> Run | None:
    net, _ = build(NETWORK, pretrained=False)
    model = lora(net, CLASSES)
    del net
    return None if model is None else stepper(model)


def plain() -> Run:
    net, _ = build(NETWORK, pretrained=False)
    return caller(net.eval())


def merged_alone() -> Run:
    base = pm.load_base(NETWORK, pretrained=False)
    return caller(worn_domain(base).frozen().merged(base))


def many_domains() -> Run:
    base = pm.load_base(NETWORK, pretrained=False)
    model = pm.MultiDomainModel(base)
    model.add("a", worn_domain(base))
    return lambda images, labels: model(images, domain="a")


def caller(net: nn.Module) -> Run:
    return torch.no_grad()(lambda images, labels: net(images))


TRAINING: dict[str, Callable[[], Run | None]] = {
    "fine-tuning": fine_tuning,
    "fine-tuning again": fine_tuning,
    "masks, eager": masks,
    "masks, compiled": masks,
    "naive autograd": naive,
    "literal Piggyback": literal_piggyback,
    "PEFT LoRA, rank 8": low_rank,
}
INFERENCE: dict[str, Callable[[], Run]] = {
    "plain network": plain,
    "plain network again": plain,
    "merged network": merged_alone,
    "MultiDomainModel, one domain": many_domains,
}


def tables(results: dict[str, Any]) -> str:
    """Peaks, and bytes per masked weight above the plain variant."""
    setup, parts = results["setup"], []
    for title, key in (
        ("training, peak over fine-tuning", "bytes_per_weight_over_finetune"),
        ("inference, peak over the plain network", "bytes_per_weight_over_plain_inference"),
    ):
        rows = [[title, "peak, MB", "bytes a masked weight"]]
        for name, found in results[key].items():
            rows.append([name, f"{results['peak_bytes'][name] / 1e6:.0f}", f"{found:+.1f}"])
        parts.append(markdown(rows))
    worst = max(results["bytes_per_weight_over_finetune"][f"masks, {k}"] for k in KINDS)
    met = "met" if worst <= GOAL else "not met"
    head = f"{setup['network']}, batch {setup['batch']} at {setup['side']} px"
    return "\n\n".join([head, *parts, f"goal, ≤ {GOAL} bytes over fine-tuning: {met}"])


KINDS = ("eager", "compiled")


if __name__ == "__main__":
    main()
