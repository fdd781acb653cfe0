"""What each library costs: the time of a step, the bytes of a domain, the convolutions that it supports."""

import copy
import random
import re
import statistics
import time
import warnings
from typing import Any

import torch
from beside_peft.sequence import attempt
from beside_peft.setting import BATCH, RANK, RATES, SIDE, SOURCES, WIDEST, stepper
from beside_peft.systems import SYSTEMS, Peft, lora, names_of, peft
from torch import nn

import polymask as pm

RANKS = (4, 8, 16)
TIMED = ((SIDE, BATCH), (224, 8))  # pixels, images per step
WARM_UP = 2  # rounds that do not count


def time_steps(net: nn.Module, side: int, batch: int, rounds: int) -> dict[str, Any]:
    """Time training steps in turn, in a new random order each round, as ratios to fine-tuning.

    The same thing timed twice, "fine-tuning again", shows the resolution of the clock.
    """
    torch.manual_seed(0)
    images, labels = torch.randn(batch, 3, side, side), torch.arange(batch) % SOURCES[WIDEST]
    steps = {
        "fine-tuning": stepper(copy.deepcopy(net), RATES["affine-full"]),
        "fine-tuning again": stepper(copy.deepcopy(net), RATES["affine-full"]),
    }
    for name, make in SYSTEMS.items():
        system = make(net)
        hold = isinstance(system, Peft) and system.norms == "held"
        steps[name] = stepper(system.trainable(WIDEST), system.rate, hold_norms=hold)
    order, seconds = list(steps), {name: [] for name in steps}
    lots = random.Random(0)
    for _ in range(rounds + WARM_UP):
        lots.shuffle(order)
        for name in order:
            begin = time.process_time()
            steps[name](images, labels)
            seconds[name].append(time.process_time() - begin)
    rows = {}
    for name, taken in seconds.items():
        ratios = [a / b for a, b in zip(taken, seconds["fine-tuning"], strict=True)][WARM_UP:]
        low, _, high = statistics.quantiles(ratios, n=4)
        rows[name] = {"median_ratio": statistics.median(ratios), "quartiles": [low, high]}
    return {"side": side, "batch": batch, "ratios": rows}


def sizes(name: str) -> dict[str, Any]:
    """Bytes of a domain on a larger network, counted, without its head."""
    base = pm.load_base(name, pretrained=False, device="meta")
    account = pm.account(base, "affine-full")
    bits = account.components
    row = {
        "base": name,
        "parameters": account.base_parameters,
        "copy": 4 * account.base_parameters,
        "affine-full": sum(bits.values()) // 8,
        "affine-full, norms": (bits["norm_affine"] + bits["norm_statistics"]) // 8,
        "lora": {},
    }
    for rank in RANKS:
        model = peft.get_peft_model(copy.deepcopy(base.net), lora(base.net, rank, None))
        row["lora"][rank] = 4 * sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    return row


def grouped_convolutions(name: str) -> dict[str, Any]:
    """How many convolutions of a network with depthwise ones each library can adapt."""
    base = pm.load_base(name, pretrained=False, device="meta")
    convolutions = names_of(base.net, nn.Conv2d)

    def accepts(layer: str) -> bool:
        config = peft.LoraConfig(r=RANK, target_modules=f"^{re.escape(layer)}$")
        return attempt(lambda: peft.get_peft_model(copy.deepcopy(base.net), config))["works"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # grouped layers that it accepts cannot be merged
        accepted = sum(map(accepts, convolutions))
    sites = [site for site in base.sites if site.removesuffix(".weight") in convolutions]
    return {
        "base": name,
        "rank": RANK,
        "convolutions": len(convolutions),
        "PEFT LoRA": accepted,
        "polymask affine-full": len(sites),
    }
