"""Trainings of seconds: their recipe, batches, domains, and a signal in the middle."""

import os

import torch

import polymask as pm
from nets import batch
from polymask.train.fit import Listener
from polymask.train.recipe import Recipe

RECIPE = Recipe(epochs=3, rate=1e-3, head_rate=1e-2, drops=(2,), batch_size=8)


class Fixed:
    """Four batches, other ones in every epoch; `val` is the first of epoch 99."""

    def __init__(self, steps: int = 4, offset: int = 0) -> None:
        self.steps, self.offset = steps, offset

    def __len__(self) -> int:
        return self.steps

    def batches(self, epoch: int = 0, start: int = 0):
        for step in range(start, self.steps):
            images, labels = batch(8, seed=0)  # the same patterns: something to learn
            noise = torch.Generator().manual_seed(1000 * (epoch + self.offset) + step)
            yield images + torch.randn(images.shape, generator=noise), labels


TRAIN, VAL = Fixed(), Fixed(1, offset=99)


def fresh(base, method="affine-full", **options):
    torch.manual_seed(0)
    return pm.new_domain(base, method, ["a", "b", "c"], **options)


def same(a, b):
    return a.state_dict().keys() == b.state_dict().keys() and all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


class StopAt(Listener):
    """Sends a signal to this very process in the middle of training."""

    def __init__(self, epoch, step, number):
        self.place, self.number = (epoch, step), number

    def step(self, epoch, step, loss, images, density):
        if (epoch, step) == self.place:
            os.kill(os.getpid(), self.number)
