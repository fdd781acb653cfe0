"""BitFit: biases of layers, shifts of norms, and nothing else."""

import pytest
import torch

import polymask as pm
from nets import batch, block_base, logits, tiny_base, train, trained
from polymask.core.merge import WorkingNetwork
from polymask.core.network import named_tensors


def changed_names(base: pm.Base, domain: pm.Domain) -> set[str]:
    return {n for n, t in domain.weights(base).items() if not torch.equal(t, base.tensor(n))}


def test_training_moves_the_biases_of_layers_and_norms_alone():
    base = tiny_base()
    domain = trained(base, "bitfit")
    biases = {"plain.bias", "hidden.bias", "stem_bn.bias", "depthwise_bn.bias", "grouped_bn.bias"}
    assert changed_names(base, domain) == biases == domain.weights(base).keys()
    shifts = dict(domain.named_transforms())
    moved = base.tensor("plain.bias") + shifts["plain.weight"].delta_bias
    assert torch.equal(domain.weights(base)["plain.bias"], moved)


def test_a_residual_network_without_biases_learns_the_shifts_of_its_norms():
    base = block_base()
    domain = pm.new_domain(base, "bitfit", ["a", "b", "c"])
    losses = train(base, domain, steps=30, rate=1e-2)
    assert min(losses[-5:]) < losses[0] - 0.05
    assert not list(domain.named_transforms())
    assert changed_names(base, domain) == {f"{norm}.bias" for norm in base.norms}


def test_statistics_and_scales_stay_the_bases_while_it_learns():
    base = tiny_base()
    domain = trained(base, "bitfit")
    assert domain.live_norms() == set()
    images = batch()[0]
    with torch.no_grad():
        assert torch.equal(domain.train().weights(base)["stem_bn.bias"], domain.eval().weights(base)["stem_bn.bias"])
        assert torch.equal(domain.merged(base)(images), domain(base, images))


def test_a_merged_and_a_working_network_share_every_weight_with_the_base():
    base = tiny_base()
    domain, other = trained(base, "bitfit"), trained(base, "affine-full")
    working = WorkingNetwork(base)
    for net in (domain.merged(base), working.switch(domain)):
        tensors = dict(named_tensors(net))
        assert all(tensors[name].data_ptr() == base.tensor(name).data_ptr() for name in base.sites)
    with torch.no_grad():
        assert torch.equal(working.switch(domain)(batch()[0]), logits(base, domain))
        working.switch(other)
        assert torch.equal(working.switch(domain)(batch()[0]), logits(base, domain))


def test_a_domain_takes_32_bits_for_every_bias():
    base = tiny_base()
    account = pm.account(base, "bitfit")
    assert account.components["bias"] == 32 * (16 + 12)
    assert account.components["norm_affine"] == 32 * (8 + 8 + 16)
    assert account.components["norm_statistics"] == account.components["weights"] == account.masked_weights == 0


@pytest.mark.parametrize("norms", ["own", "shared"])
def test_norms_may_be_all_own_or_none(norms):
    base = tiny_base()
    domain = pm.new_domain(base, "bitfit", None, norms=norms)
    assert bool(list(domain.named_norms())) == (norms == "own")
