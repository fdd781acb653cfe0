"""What learning costs: the transform alone, whole steps, waiting for images, two settings."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from cost.network import CLASSES, NAMES, NETWORK, SIDE, worn_domain
from cost.rivals import MaskedConv, NaiveMasks, lora, piggyback
from cost.timing import Clock, ratios
from torch import Tensor, nn

import polymask as pm
from polymask.core.merge import keep_freed_memory
from polymask.methods.affine.formula import set_kernels
from polymask.nets.zoo import build
from polymask.train.learner import DomainLearner, placed
from polymask.train.recipe import get_recipe

BATCH = 8


def transform(clock: Clock, rounds: int) -> dict[str, Any]:
    """W~ of all sites and the gradients of all scores and scalars, against a copy of W."""
    base = pm.load_base(NETWORK, pretrained=False)
    shapes = [site.shape for site in base.sites.values()]
    by_rows = [torch.randn(shape) for shape in shapes]
    # As convolutions return them for channels-last images.
    by_channels = [g.contiguous(memory_format=torch.channels_last) for g in by_rows]
    source = torch.randn(sum(g.numel() for g in by_rows))
    target = torch.empty_like(source)
    naive = NaiveMasks(base, 2)
    convs = [MaskedConv(m) for m in base.net.modules() if isinstance(m, nn.Conv2d)]
    literal = nn.ModuleList(convs)

    def masks(kind: str, gradients: list[Tensor]) -> Callable[[], None]:
        own = pm.load_base(NETWORK, pretrained=False)
        domain = worn_domain(own).train()

        def weights() -> list[Tensor]:
            """What `Domain.weights` does for the sites."""
            made = domain.method.together(own, domain)
            found = domain.named_transforms()
            return [made[n] if n in made else t.weight(own.tensor(n)) for n, t in found]

        def call() -> None:
            set_kernels(kind)
            back(weights, gradients, domain)

        return call

    calls = {
        "memcpy": lambda: target.copy_(source),
        "memcpy again": lambda: target.copy_(source),
        "naive autograd": lambda: back(naive.weights, by_rows, naive),
        "literal Piggyback": lambda: back(lambda: [c.masked() for c in convs], by_rows, literal),
        "eager": masks("eager", by_rows),
        "compiled": masks("compiled", by_rows),
        "eager, gradients by channels": masks("eager", by_channels),
        "compiled, gradients by channels": masks("compiled", by_channels),
    }
    seconds = clock.interleaved(calls, rounds)
    set_kernels("eager")
    against_naive = ratios(seconds, "naive autograd")
    return {
        "weights": source.numel(),
        "layers": len(shapes),
        "ratios": ratios(seconds, "memcpy"),
        "times_faster_than_naive": {
            kind: round(1 / against_naive[kind]["median"], 2) for kind in ("eager", "compiled")
        },
    }


class Network(torch.autograd.Function):
    """A stand-in for a network: takes weights, keeps none, and returns these gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.gradients)


def back(weights: Callable[[], list[Tensor]], gradients: list[Tensor], module: nn.Module) -> None:
    Network.apply(gradients, *weights()).backward()
    module.zero_grad()


def step(clock: Clock, rounds: int) -> dict[str, Any]:
    """Whole training steps, all with fused Adam and channels last, against plain fine-tuning."""
    net, _ = build(NETWORK, pretrained=False)
    images = torch.randn(BATCH, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(BATCH)

    def masks(kind: str) -> Callable[[], None]:
        """What `fit` does with a batch."""
        base = pm.load_base(copy.deepcopy(net), name="resnet50", input=pm.InputSpec())
        domain = pm.new_domain(base, "affine-full", NAMES).train()
        learner = DomainLearner(base, domain, get_recipe("imagenet-to-sketch"))

        def call() -> None:
            set_kernels(kind)
            learner.step(images, labels, 0.5)

        return call

    def plain() -> nn.Module:
        whole = copy.deepcopy(net)
        whole.fc = nn.Linear(2048, CLASSES)
        return whole

    models = {
        "fine-tuning": plain(),
        "fine-tuning again": plain(),
        "naive autograd": NaiveMasks(pm.load_base(copy.deepcopy(net), name="resnet50"), CLASSES),
        "literal Piggyback": piggyback(net, CLASSES),
        "PEFT LoRA, rank 8": lora(net, CLASSES),
    }
    calls = {name: partial(stepper(model), images, labels) for name, model in models.items() if model is not None}
    calls |= {"masks, eager": masks("eager"), "masks, compiled": masks("compiled")}
    seconds = clock.interleaved(calls, rounds)
    set_kernels("eager")
    return {"side": SIDE, "batch": BATCH, "ratios": ratios(seconds, "fine-tuning")}


def small_step(clock: Clock, rounds: int) -> dict[str, Any]:
    """Steps as `learn` takes them by default, on small images, against a plain loop over timm's same network."""
    side, batch = 96, 32
    images = torch.randn(batch, 3, side, side).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(batch)

    def plain(*, compiled: bool = False) -> Callable[[], None]:
        net, _ = build("efficientnet-lite0", pretrained=False, classes=CLASSES)
        return partial(stepper(net, compiled=compiled), images, labels)

    def learned(method: str, kind: str, **options: Any) -> Callable[[], None]:
        base = pm.load_base("efficientnet-lite0", pretrained=False)
        learner = DomainLearner(base, pm.new_domain(base, method, NAMES, **options).train(), get_recipe("quick"))

        def call() -> None:
            set_kernels(kind)
            learner.step(images, labels, 0.5)

        return call

    calls = {
        "timm": plain(),
        "timm again": plain(),
        "timm, torch.compile of the network": plain(compiled=True),
        "fine-tuning": learned("finetune", "eager"),
        "masks, eager": learned("affine-full", "eager"),
        "masks, compiled": learned("affine-full", "compiled"),
        "masks and `affine` norms, eager": learned("affine-full", "eager", norms="affine"),
    }
    keep_freed_memory()  # as the verbs that train do; the loop over timm's network gains by it too
    seconds = clock.interleaved(calls, 3 * rounds)
    set_kernels("eager")
    return {"side": side, "batch": batch, "ratios": ratios(seconds, "timm")}


def stepper(model: nn.Module, *, compiled: bool = False) -> Callable[[Tensor, Tensor], None]:
    """One step for every parameter that learns; its passes through the network eager or compiled."""
    model.train().to(memory_format=torch.channels_last)
    if isinstance(model, NaiveMasks):
        model.base.apply(lambda t: t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(learned, 1e-4, fused=True)
    network = torch.compile(model) if compiled else model

    def run(images: Tensor, labels: Tensor) -> None:
        optimiser.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimiser.step()

    return run


def settings(clock: Clock, rounds: int) -> dict[str, Any]:
    """Training steps with channels last and with bfloat16, on two networks."""
    found = {}
    for name, side, batch in (("efficientnet-lite0", 96, 8), ("torchvision:resnet18", 96, 8)):
        base = pm.load_base(name, pretrained=False)
        calls = {
            "rows": timed_setting(base, side, batch, channels_last=False, autocast=False),
            "channels last": timed_setting(base, side, batch, channels_last=True, autocast=False),
            "bfloat16": timed_setting(base, side, batch, channels_last=True, autocast=True),
        }
        found[name] = ratios(clock.interleaved(calls, 3), "rows")
    return {"side": 96, "batch": 8, "ratios": found}


def timed_setting(base: pm.Base, side: int, batch: int, *, channels_last: bool, autocast: bool) -> Callable[[], object]:
    recipe = get_recipe("quick", side=side, channels_last=channels_last, autocast=autocast)
    domain = pm.new_domain(base, "finetune", NAMES).train()
    learner = DomainLearner(base, domain, recipe)
    images, labels = placed(torch.randn(batch, 3, side, side), torch.arange(batch), base, recipe)
    return lambda: learner.step(images, labels, 0.5)
