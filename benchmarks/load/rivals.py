"""The comparisons: the bare network, and a whole checkpoint for each domain."""

import time
from collections import OrderedDict
from pathlib import Path

import torch
from load.requests import zipf
from safetensors.torch import load_file, save_file
from torch import nn

import polymask as pm
from polymask.core.network import structural_copy
from polymask.train.predict import logits, network

FILES = 50  # of checkpoints; domain i has file i % 50, so that the disk is not measured


def bare_forward(base: pm.Base, domain: pm.Domain, batch: int, seconds: float) -> float:
    """Images per second of the merged network, on a batch in memory, with every core."""
    net = network(base, domain)
    images = torch.randn(batch, *base.input.shape)
    for _ in range(3):
        logits(net, images)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        logits(net, images)
        count += batch
    return count / (time.perf_counter() - began)


class Checkpoints:
    """Every domain is a whole network in a file; the last `kept` stay in memory.

    There is no HTTP and no image to decode: the comparison covers only the cost of a domain.
    """

    def __init__(self, base: pm.Base, domain: pm.Domain, folder: Path) -> None:
        self._whole = network(base, domain)
        self._folder = folder
        self._image = torch.randn(1, *base.input.shape)
        state = {name: t.contiguous().clone() for name, t in self._whole.state_dict().items()}
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        for i in range(FILES):
            save_file(state, folder / f"full-{i}.safetensors")

    def run(self, domains: int, kept: int, warm_up: int, seconds: float) -> dict[str, float]:
        """Images per second, one after another, for domains drawn by Zipf(1.0)."""
        nets: OrderedDict[int, nn.Module] = OrderedDict()
        began, count, hits = time.perf_counter(), 0, 0
        for turn, i in enumerate(zipf(domains, seed=1)):
            if turn == warm_up:
                began, count, hits = time.perf_counter(), 0, 0
            net = nets.pop(i, None)
            hits += net is not None
            nets[i] = net = net or self._load(i)
            logits(net, self._image)
            while len(nets) > kept:
                nets.popitem(last=False)
            count += 1
            if turn > warm_up and time.perf_counter() - began > seconds:
                break
        elapsed = time.perf_counter() - began
        return {"images_per_second": count / elapsed, "hit_rate": hits / count}

    def _load(self, i: int) -> nn.Module:
        net = structural_copy(self._whole)
        tensors = load_file(self._folder / f"full-{i % FILES}.safetensors")
        net.load_state_dict({name: t.clone() for name, t in tensors.items()}, assign=True)
        return net
