"""The threshold and its surrogate gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polymask.core.bits import binarize


@pytest.mark.parametrize("surrogate", ["identity", "sigmoid"])
def test_the_value_is_one_from_the_threshold_on(surrogate):
    scores = torch.tensor([-1.0, 0.25, 0.5, 0.75])
    assert binarize(scores, 0.5, surrogate).tolist() == [0, 0, 1, 1]


def test_the_identitys_gradient_passes_straight_through():
    scores = torch.randn(5, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(5, dtype=torch.float64)
    binarize(scores, 0.1).backward(gradient)
    assert torch.equal(scores.grad, gradient)


def test_the_sigmoids_gradient_is_that_of_a_sigmoid_around_the_threshold():
    scores = torch.randn(5, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(5, dtype=torch.float64)
    binarize(scores, 0.1, "sigmoid").backward(gradient)
    twin = scores.detach().clone().requires_grad_()
    torch.sigmoid(twin - 0.1).backward(gradient)
    torch.testing.assert_close(scores.grad, twin.grad, rtol=0, atol=1e-15)


@given(st.floats(-5, 5), st.floats(-5, 5), st.sampled_from(["identity", "sigmoid"]))
def test_a_step_down_the_surrogate_gradient_never_moves_the_mask_uphill(r, slope, surrogate):
    scores = torch.tensor([r], dtype=torch.float64, requires_grad=True)
    before = binarize(scores, 0.0, surrogate)
    (before * slope).sum().backward()
    after = binarize(scores.detach() - scores.grad, 0.0, surrogate)
    assert ((after - before) * slope).sum() <= 0
