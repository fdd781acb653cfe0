"""A small network that has learned something, and domains for it to learn one after another."""

import os
import signal
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

import polymask as pm
from nets import SPEC, TinyNet
from polymask.train.fit import Listener
from polymask.train.fit_all import Lesson
from polymask.train.recipe import Recipe

RECIPE = Recipe(
    epochs=8,
    rate=5e-3,
    weight_rate=5e-3,
    head_optimiser="adam",
    head_rate=1e-2,
    schedule="cosine",
    selection="last",
)


class Patterns:
    """Classes are coarse patterns in noise; `domain` says which, `offset` makes other noise."""

    def __init__(self, domain: int, steps: int = 8, offset: int = 0, classes: int = 4) -> None:
        self.steps, self.offset, self.classes = steps, offset, classes
        generator = torch.Generator().manual_seed(domain)
        coarse = torch.randn(classes, 3, 4, 4, generator=generator)
        self.patterns = F.interpolate(coarse, size=SPEC.shape[1:])

    def __len__(self) -> int:
        return self.steps

    def batches(self, epoch: int = 0, start: int = 0):
        for step in range(start, self.steps):
            noise = torch.Generator().manual_seed(1000 * (epoch + self.offset) + step)
            labels = torch.arange(32) % self.classes
            yield self.patterns[labels] + torch.randn(32, *SPEC.shape, generator=noise), labels

    def images(self):
        """One pass, as a method's hooks are given it."""
        return self.batches()


def lesson(domain: int, classes: int = 4) -> Lesson:
    names = [f"class {i}" for i in range(classes)]
    return Lesson(names, Patterns(domain, classes=classes), None, Patterns(domain, 4, 9000, classes))


@cache
def learned_net() -> TinyNet:
    """A network that knows domain 100, of eight classes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = TinyNet(classes=8).train()
        net.dropout.p = 0.0
        optimiser = torch.optim.Adam(net.parameters(), 3e-3)
        for epoch in range(12):
            for images, labels in Patterns(100, classes=8).batches(epoch):
                loss = F.cross_entropy(net(images), labels)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    return net.eval()


def learned_base(**options) -> pm.Base:
    return pm.load_base(learned_net(), name="learned", input=SPEC, **options)


def new(base: pm.Base, method: pm.Method, classes: int = 3, seed: int = 0) -> pm.Domain:
    torch.manual_seed(seed)
    return pm.new_domain(base, method, [f"class {i}" for i in range(classes)])


@torch.no_grad()
def moved_at_random(domain: pm.Domain, size: float = 0.05, seed: int = 0) -> pm.Domain:
    """The domain, with all that it learns moved a little, in its stored form."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in domain.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(size * noise.to(parameter.dtype))
    for _, own in domain.named_norms():
        if "running_mean" in own._buffers:
            own.running_mean.add_(size)
    return domain.frozen()


def sequence(base: pm.Base, method: pm.Method, classes: tuple[int, ...], size: float = 0.05) -> list[pm.Domain]:
    """Domains of so many classes, each made after those before it and moved at random."""
    earlier: list[pm.Domain] = []
    for i, count in enumerate(classes):
        following = method.after(earlier)
        domain = new(base, following, count, seed=i)
        following.follow(domain, earlier)
        earlier.append(moved_at_random(domain, size, seed=i))
    return earlier


@torch.no_grad()
def change(base: pm.Base, before: pm.Domain, after: pm.Domain, images: Tensor) -> float:
    """The KL divergence between what two domains say of images."""
    p, q = (F.log_softmax(domain(base, images), 1) for domain in (before, after))
    return F.kl_div(q, p, reduction="batchmean", log_target=True).item()


class Interrupt(Listener):
    """Asks to stop after some steps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def step(self, epoch, step, loss, images, density):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
