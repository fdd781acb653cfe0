"""Operations of networks, and what a domain that drops channels saves of them."""

import torch
from torch import nn

import polymask as pm
from nets import SPEC, block_base, tiny_base, trained
from polymask.core.accounting import flops, flops_ratio


def set_scores(transform: pm.Transform, scores) -> None:
    with torch.no_grad():
        transform.scores.copy_(torch.as_tensor(scores))


def test_operations_are_two_for_a_multiplication_and_an_addition():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 5))
    expected = 2 * (8 * 3 * 9 * 16 + 8 * 16 * 5)
    assert flops(net, (3, 4, 4)) == flops(net.to("meta"), (3, 4, 4)) == expected


def test_half_of_the_channels_are_half_of_the_operations():
    base = block_base()
    domain = pm.new_domain(base, "ba2-50", ["a", "b"])
    whole = flops(domain.merged(base), SPEC.shape)
    compact = flops(domain.merged(base, compact=True), SPEC.shape)
    head, stem = 2 * 12 * 2, 2 * 4 * 3 * 9 * 16 * 16  # the head reads all, the stem one of three
    assert compact == head + stem // 3 + (whole - head - stem) // 2
    assert flops_ratio(base, domain) == compact / whole < 0.5


def test_a_domain_that_drops_no_channels_saves_no_operations():
    base = tiny_base()
    assert flops_ratio(base, trained(base, "affine-full")) == 1
    assert flops_ratio(base, pm.new_domain(base, "ba2", ["a", "b"])) == 1


def test_depthwise_channels_that_are_off_are_not_computed():
    base = tiny_base()
    domain = pm.new_domain(base, "ba2", ["a", "b"]).eval()
    before = flops(domain.merged(base), SPEC.shape)
    depthwise = dict(domain.named_transforms())["depthwise.weight"]
    set_scores(depthwise, [1, -1, -1, 1, 1, -1, -1, -1])
    after = flops(domain.merged(base, compact=True), SPEC.shape)
    assert before - after == 2 * 5 * 9 * 16 * 16
