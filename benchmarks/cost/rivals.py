"""Other ways to learn masks on a network, reimplemented, and LoRA if PEFT is installed."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polymask as pm
from polymask.core.bits import binarize


class NaiveMasks(nn.Module):
    """Affine masks with plain operations: autograd keeps what each of them needs."""

    def __init__(self, base: pm.Base, classes: int) -> None:
        super().__init__()
        self.base = base
        self.names = list(base.sites)
        weights = [base.tensor(name) for name in self.names]
        self.scores = nn.ParameterList([torch.empty_like(w).uniform_(1e-4, 2e-4) for w in weights])
        self.scalars = nn.ParameterList([torch.zeros(3) for _ in weights])
        self.norms = nn.ParameterDict()
        for norm in base.norms.values():
            for leaf in norm.affine:
                name = f"{norm.name}.{leaf}"
                self.norms[name.replace(".", "/")] = nn.Parameter(base.tensor(name).clone())
        self.head = nn.Linear(base.feature_dim or 0, classes)

    def weights(self) -> list[Tensor]:
        """W + k1 + k2 M + k3 W∘M of every site."""
        made = []
        for name, scores, (k1, k2, k3) in zip(self.names, self.scores, self.scalars, strict=True):
            weight, mask = self.base.tensor(name), binarize(scores)
            made.append(weight + k1 + k2 * mask + k3 * (weight * mask))
        return made

    def forward(self, images: Tensor) -> Tensor:
        named = dict(zip(self.names, self.weights(), strict=True))
        own = {name.replace("/", "."): p for name, p in self.norms.items()}
        live = set(self.base.norms)
        named |= own | self.base.scratch_buffers(live, named | own)
        with self.base.training(live):
            return self.head(torch.func.functional_call(self.base.net, named, (images,)))


class _Threshold(torch.autograd.Function):
    """Zeros and ones, assigned to what a comparison selects; the gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, at: float) -> Tensor:
        mask = scores.clone()
        mask[scores < at] = 0
        mask[scores >= at] = 1
        return mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class MaskedConv(nn.Module):
    """A convolution with a mask over its frozen weight, as a separate layer like Piggyback's."""

    def __init__(self, conv: nn.Conv2d, at: float = 5e-3) -> None:
        super().__init__()
        self.weight = nn.Parameter(conv.weight.detach(), requires_grad=False)
        self.scores = nn.Parameter(torch.full_like(conv.weight, 1e-2))
        self.conv, self.at = {"stride": conv.stride, "padding": conv.padding}, at

    def masked(self) -> Tensor:
        return _Threshold.apply(self.scores, self.at) * self.weight

    def forward(self, images: Tensor) -> Tensor:
        return F.conv2d(images, self.masked(), None, **self.conv)


def piggyback(net: nn.Module, classes: int) -> nn.Module:
    """The network with every convolution replaced by a masked one, and a new head."""
    net = copy.deepcopy(net).requires_grad_(False)
    for name, module in list(net.named_modules()):
        if isinstance(module, nn.Conv2d):
            parent, _, leaf = name.rpartition(".")
            setattr(net.get_submodule(parent), leaf, MaskedConv(module))
    net.fc = nn.Linear(net.fc.in_features, classes)
    return net


def lora(net: nn.Module, classes: int, rank: int = 8) -> nn.Module | None:
    """PEFT's LoRA on every convolution, with a new head; None if PEFT is not installed."""
    try:
        import peft
    except ImportError:
        return None
    net = copy.deepcopy(net)
    net.fc = nn.Linear(net.fc.in_features, classes)
    convolutions = [name for name, m in net.named_modules() if isinstance(m, nn.Conv2d)]
    config = peft.LoraConfig(r=rank, target_modules=convolutions, modules_to_save=["fc"])
    return peft.get_peft_model(net, config)
