"""BitDelta: the nearest signs and scale, and the affine form of it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import polymask as pm
from nets import SPEC, logits, tiny_base, trained
from polymask.accounting import component_bits
from polymask.bits import Bits
from polymask.methods.affine_map import affine
from polymask.methods.bitdelta import BitDelta, BitDeltaTransform, nearest

changes = st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=40)


def transform_of(shape=(4, 3, 3, 3), dtype=torch.float32, seed=0):
    """A transform of one site with an α that is not zero and a mask of both kinds, and its W."""
    torch.manual_seed(seed)
    conv = nn.Conv2d(shape[1], shape[0], shape[2], padding=1, bias=False).to(dtype)
    base = pm.load_base(conv, input=pm.InputSpec((shape[1], 6, 6), (0.5,) * 3, (0.5,) * 3))
    transform = BitDelta(scores=(-1.0, 1.0)).transform(base.sites["weight"])
    nn.init.normal_(transform.alpha)
    return transform, base.tensor("weight")


@given(changes)
def test_alpha_is_the_least_squares_scale_of_its_signs(values):
    delta = torch.tensor(values, dtype=torch.float64)
    mask, alpha = nearest(delta)
    signs = 2 * mask.double() - 1
    (solved,), *_ = np.linalg.lstsq(signs[:, None].numpy(), delta.numpy(), rcond=None)
    assert alpha.item() == pytest.approx(solved, abs=1e-12)
    assert alpha.item() == pytest.approx(delta.abs().mean().item(), abs=1e-12)


@settings(max_examples=50)
@given(changes, st.integers(0, 2**31))
def test_no_other_signs_and_scale_are_nearer(values, seed):
    delta = torch.tensor(values, dtype=torch.float64)
    mask, alpha = nearest(delta)
    least = (delta - alpha * (2 * mask.double() - 1)).square().sum()
    for scale in torch.linspace(-4, 4, 81, dtype=torch.float64):
        assert least <= (delta - scale * (2 * mask.double() - 1)).square().sum() + 1e-12
    other = torch.rand(len(delta), generator=torch.Generator().manual_seed(seed)) > 0.5
    signs = 2 * other.double() - 1
    best = (delta * signs).mean()
    assert least <= (delta - best * signs).square().sum() + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_affine_form_to_the_bit(dtype):
    transform, W = transform_of(dtype=dtype)
    alpha, M = transform.alpha.detach(), transform.mask()
    assert 0 < M.double().mean() < 1
    assert torch.equal(transform.weight(W), affine(W, M, 1.0, -alpha, 2 * alpha, 0.0))


def test_gradients_are_those_of_the_formula():
    transform, W = transform_of(dtype=torch.float64)
    G = torch.randn(W.shape, dtype=torch.float64)
    (transform.weight(W) * G).sum().backward()
    signs = 2 * transform.mask().double() - 1
    torch.testing.assert_close(transform.alpha.grad, (G * signs).sum().reshape(1))
    torch.testing.assert_close(transform.scores.grad, 2 * transform.alpha.detach() * G)


def test_a_fresh_domain_is_the_base_and_learns_masks_and_scales():
    base = tiny_base()
    fresh = pm.new_domain(base, "bitdelta", ["a", "b", "c"])
    assert all(torch.equal(t, base.tensor(n)) for n, t in fresh.weights(base).items())
    learned = trained(base, "bitdelta")
    densities = []
    for _, transform in learned.named_transforms():
        assert transform.alpha.item() != 0
        densities.append(transform.mask().double().mean().item())
    assert min(densities) < 1  # all scores start above the threshold


def test_the_stored_form_holds_one_bit_per_weight_one_scale_and_the_change_of_the_bias():
    base = tiny_base()
    frozen = trained(base, "bitdelta").frozen()
    for name, transform in frozen.named_transforms():
        stored = transform.stored()
        assert transform.scores is None
        assert isinstance(stored["mask"], Bits)
        assert stored["mask"].numel == base.tensor(name).numel()
        assert stored["alpha"].shape == (1,)
        assert ("bias" in stored) == base.sites[name].has_bias
    bits = component_bits(frozen)
    assert bits["mask"] == sum(site.numel for site in base.sites.values())
    assert bits["scalars"] == 32 * len(base.sites)
    assert bits["bias"] == 32 * sum(s.channels for s in base.sites.values() if s.has_bias)


def test_a_domain_takes_about_one_bit_per_weight_of_a_real_network():
    base = pm.load_base("torchvision:resnet50", pretrained=False, device="meta")
    counted = pm.account(base, "bitdelta")
    assert counted.components["mask"] == counted.masked_weights == 23_454_912
    assert counted.components["scalars"] == 32 * 53
    assert 1.03 < counted.params_paper < 1.04
    assert 1.0 < counted.bits_per_weight < 1.15


def test_half_precision_weights_stay_half_precision():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).bfloat16()
    base = pm.load_base(net, input=SPEC)
    domain = pm.new_domain(base, "bitdelta", None)
    weights = domain.weights(base)
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    sum(t.float().sum() for t in weights.values()).backward()
    assert all(p.grad.dtype == torch.float32 for p in domain.transforms.parameters())


def test_both_forms_give_the_same_outputs():
    base = tiny_base()
    domain = trained(base, "bitdelta")
    assert all(isinstance(t, BitDeltaTransform) for _, t in domain.named_transforms())
    assert torch.equal(logits(base, domain.frozen()), logits(base, domain))


@pytest.mark.parametrize("scores", [(2.0, 1.0), (1.0,), "ab", 3])
def test_senseless_scores_are_refused_by_name(scores):
    with pytest.raises(pm.MethodError, match="must be a range"):
        pm.create_method("bitdelta", scores=scores)
