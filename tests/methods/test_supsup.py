"""SupSup: a mask alone, from scores around the threshold."""

import torch

import polymask as pm
from nets import tiny_base, trained


def test_a_domain_is_the_bases_weights_where_scores_are_not_negative_and_zero_elsewhere():
    base = tiny_base()
    domain = trained(base, "supsup")
    weights = domain.weights(base)
    for name, transform in domain.named_transforms():
        expected = torch.where(transform.scores >= 0, base.tensor(name), torch.zeros(()))
        assert torch.equal(weights[name], expected)
    frozen = domain.frozen()
    assert all(torch.equal(frozen.weights(base)[name], weights[name]) for name in base.sites)


def test_about_half_of_a_fresh_mask_is_on_and_a_bit_a_weight_is_stored():
    torch.manual_seed(0)
    base = tiny_base()
    domain = pm.new_domain(base, "supsup", None)
    masks = torch.cat([t.mask().flatten() for _, t in domain.named_transforms()])
    assert 0.4 < masks.double().mean() < 0.6
    bits = pm.account(base, "supsup").components
    assert (bits["mask"], bits["scalars"], bits["norm_affine"]) == (len(masks), 0, 0)
