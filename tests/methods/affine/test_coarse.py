"""Masks below one bit a weight: who shares a bit, what it learns by, what it costs."""

import math

import pytest
import torch
from torch import nn

import polymask as pm
from nets import SPEC, tiny_net
from polymask.errors import MethodError
from polymask.methods.affine.coarse import AffineCoarse
from polymask.methods.affine.formula import affine


def worn(bits, per="layer"):
    """A convolution in double precision, and the transform of its weight with numbers on all sides."""
    torch.manual_seed(0)
    base = pm.load_base(nn.Conv2d(3, 4, 3).double(), input=pm.InputSpec((3, 6, 6), (0.5,) * 3, (0.5,) * 3))
    transform = AffineCoarse(bits=bits, per=per, scores=(-1.0, 1.0)).transform(base.sites["weight"])
    transform.begin(base.tensor("weight"))
    with torch.no_grad():
        for name in ("k0", "k1", "k2", "k3"):
            transform.get_parameter(name).normal_()
    return transform, base.tensor("weight")


def spelled_out(transform, few):
    """M by the definition: weight i of a filter has bit i // g."""
    rows, columns = 4, 27
    whole = torch.empty(rows, columns, dtype=few.dtype)
    for o in range(rows):
        for i in range(columns):
            whole[o, i] = few[o, i // transform.shared_by]
    return whole.view(4, 3, 3, 3)


@pytest.mark.parametrize("per", ["layer", "channel"])
@pytest.mark.parametrize(("bits", "groups"), [(1.0, 27), (0.5, 14), (0.4, 9), (1 / 9, 3), (0.01, 1)])
def test_neighbours_in_a_filter_share_a_bit(bits, groups, per):
    transform, W = worn(bits, per)
    assert transform.mask().shape == (4, groups)
    expected = affine(W, spelled_out(transform, transform.mask()), *transform.coefficients())
    assert torch.equal(transform.weight(W), expected)


def test_a_scores_gradient_is_the_sum_over_the_weights_that_share_it():
    transform, W = worn(0.25)
    G = torch.randn_like(W)
    (transform.weight(W) * G).sum().backward()
    _, _, k2, k3 = transform.coefficients()
    each = ((k2 + k3 * W) * G).detach().view(4, 27)
    for o in range(4):
        for group in range(7):
            some = each[o, 4 * group : 4 * group + 4]
            assert transform.scores.grad[o, group].item() == pytest.approx(some.sum().item(), abs=1e-12)


def test_what_is_stored_is_within_the_budget_and_gives_the_same_logits(tmp_path):
    base = pm.load_base(tiny_net(), input=SPEC)
    domain = pm.new_domain(base, "affine-coarse", ["a", "b"], bits=0.25)
    weights = sum(site.numel for site in base.sites.values())
    filters = sum(site.shape[0] for site in base.sites.values())
    masks = sum(math.prod(t.mask().shape) for _, t in domain.named_transforms())
    assert masks <= weights / 4 + filters  # a filter's last bit may have less than four weights
    images = torch.randn(3, *SPEC.shape)
    stored = domain.eval().frozen()
    stored.save(tmp_path / "d.safetensors")
    loaded = pm.load_domain(tmp_path / "d.safetensors", base)
    with torch.no_grad():
        assert torch.equal(loaded(base, images), stored(base, images))
        assert torch.equal(loaded.merged(base)(images), stored(base, images))


@pytest.mark.parametrize("bits", [0, -1, 1.5, "half", 1e-9])
def test_a_budget_that_makes_no_sense_is_refused(bits):
    with pytest.raises(MethodError, match="bits="):
        pm.create_method("affine-coarse", bits=bits)
