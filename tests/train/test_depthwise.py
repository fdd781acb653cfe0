"""Depthwise convolutions with a gradient of their own: torch's values, the same gradients."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymask as pm
from polymask.train import descent as depthwise
from polymask.train.descent import TapByTap, has_depthwise


def gradients(images, conv):
    images = images.clone().requires_grad_()
    conv.zero_grad()
    out = conv(images)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return out, images.grad, *(p.grad for p in conv.parameters())


@pytest.mark.parametrize("stride", [1, 2, (2, 1)])
@pytest.mark.parametrize(("padding", "dilation"), [(2, 1), (0, 1), (3, 2), ((1, 2), 1)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_every_gradient_is_torchs_own(stride, padding, dilation, layout):
    torch.manual_seed(0)
    for kernel, size in product([(5, 5), (3, 3), (3, 5)], [(2, 2), (4, 3), (6, 7)]):
        conv = nn.Conv2d(6, 6, kernel, stride, padding, dilation, groups=6)
        if any(n + 2 * p <= dilation * (k - 1) for n, p, k in zip(size, conv.padding, kernel, strict=True)):
            continue  # the kernel is larger than the image
        images = torch.randn(3, 6, *size).contiguous(memory_format=layout)
        expected = gradients(images, conv)
        with TapByTap():
            found = gradients(images, conv)
        assert torch.equal(found[0], expected[0])
        for ours, torchs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)


def calls_of(monkeypatch):
    """How often the gradient of this module has been computed."""
    seen = []
    original = depthwise.weight_gradient

    def counted(*arguments):
        seen.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(depthwise, "weight_gradient", counted)
    return seen


def test_only_small_maps_of_depthwise_layers_that_learn_are_taken(monkeypatch):
    seen = calls_of(monkeypatch)
    weight = torch.randn(4, 1, 5, 5, requires_grad=True)
    dense = torch.randn(4, 4, 5, 5, requires_grad=True)
    small, large = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 8, 8)
    with TapByTap():
        F.conv2d(large, weight, padding=2, groups=4).sum().backward()
        F.conv2d(small, dense, padding=2).sum().backward()
        F.conv2d(small, weight, padding="same", groups=4).sum().backward()
        F.conv2d(small.double(), weight.double(), padding=2, groups=4).sum().backward()
        F.conv2d(small.requires_grad_(), weight.detach(), padding=2, groups=4).sum().backward()
        assert not seen
        F.conv2d(small, weight, padding=2, groups=4).sum().backward()
    assert len(seen) == 1
    F.conv2d(small, weight, padding=2, groups=4).sum().backward()
    assert len(seen) == 1


class Separable(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 8, 5, padding=2, groups=8)
        self.last = nn.Linear(8, 4)

    def forward(self, images):
        return self.last(self.deep(self.first(images).relu()).mean((2, 3)))


@pytest.mark.parametrize("method", ["affine-full", "finetune"])
def test_training_takes_them_and_learns_what_it_did(monkeypatch, method):
    from polymask.train.learner import DomainLearner

    seen = calls_of(monkeypatch)
    torch.manual_seed(0)
    base = pm.load_base(Separable(), input=pm.InputSpec((3, 4, 4)))
    images, labels = torch.randn(4, 3, 4, 4), torch.tensor([0, 1, 0, 1])
    learned = []
    for taps in (True, False):
        torch.manual_seed(1)
        domain = pm.new_domain(base, method, ["a", "b"]).train()
        learner = DomainLearner(base, domain, pm.get_recipe("quick"))
        assert learner.depthwise
        learner.depthwise = taps
        loss, _ = learner.loss(images, labels)
        loss.backward()
        assert len(seen) == 1
        learned.append([p.grad for p in domain.parameters() if p.grad is not None])
    assert learned[0]
    for ours, torchs in zip(*learned, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-6)


def test_a_network_without_such_layers_is_left_alone():
    assert has_depthwise(Separable())
    assert not has_depthwise(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2)))
