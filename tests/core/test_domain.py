"""Domains: what becomes of the norms, what is learned, what is refused."""

import pytest
import torch
from torch import nn

import polymask as pm
from nets import SPEC, batch, logits, tiny_base, train, trained

AFFINE, STATISTICS = {"weight", "bias"}, {"running_mean", "running_var"}


def moved(base, domain):
    """The norm tensors that training changed."""
    return {
        name
        for norm, own in domain.named_norms()
        for name, tensor in own.stored().items()
        if not torch.equal(tensor, base.tensor(f"{norm}.{name}"))
    }


@pytest.mark.parametrize(
    ("norms", "stored"),
    [("own", AFFINE | STATISTICS), ("shared", set()), ("affine", AFFINE), ("stats", STATISTICS)],
)
def test_each_norm_policy_learns_and_stores_what_it_says(norms, stored):
    base = tiny_base()
    domain = trained(base, norms=norms)
    kept = {name for _, own in domain.named_norms() for name in own.stored()}
    assert kept == stored
    assert moved(base, domain) == stored


@pytest.mark.parametrize("norms", ["shared", "affine"])
def test_shared_statistics_run_in_eval_mode_while_training(norms):
    base = tiny_base()
    domain = pm.new_domain(base, "affine-full", ["a", "b"], norms=norms)
    base.net.dropout.p = 0.0
    images, _ = batch()
    assert torch.equal(domain.train()(base, images), domain.eval()(base, images))


def test_own_norms_use_the_batchs_statistics_while_training():
    base = tiny_base()
    domain = pm.new_domain(base, "affine-full", ["a", "b"])
    base.net.dropout.p = 0.0
    images, _ = batch()
    assert not torch.equal(domain.train()(base, images), domain.eval()(base, images))


def test_dropout_is_active_while_training():
    base = tiny_base()
    domain = pm.new_domain(base, "affine-full", ["a", "b"], norms="shared").train()
    images, _ = batch(64)
    assert not torch.equal(domain(base, images), domain(base, images))


def test_the_momentum_of_the_statistics_is_an_option():
    images, _ = batch(64)
    for momentum in (None, 0.1, 1.0):
        base = tiny_base()
        domain = pm.new_domain(base, "affine-full", ["a"], norm_momentum=momentum).train()
        domain(base, images)
        own = dict(domain.named_norms())["stem_bn"].running_mean
        mean = nn.functional.conv2d(images, base.tensor("stem.weight"), padding=1).mean((0, 2, 3))
        share = 0.1 if momentum is None else momentum
        old = base.tensor("stem_bn.running_mean")
        torch.testing.assert_close(own, (1 - share) * old + share * mean)
        assert base.net.stem_bn.momentum == 0.1


def test_reestimation_averages_the_statistics_over_all_batches():
    base = tiny_base()
    domain = trained(base)
    batches = [batch(16, seed=seed)[0] for seed in range(4)]
    domain.reestimate_norms(base, batches)
    with torch.no_grad():
        W = domain.weights(base)["stem.weight"]
        means = [nn.functional.conv2d(x, W, padding=1).mean((0, 2, 3)) for x in batches]
    own = dict(domain.named_norms())["stem_bn"].running_mean
    torch.testing.assert_close(own, torch.stack(means).mean(0), rtol=1e-4, atol=1e-5)
    assert not domain.training
    base.verify()


def test_reestimation_of_shared_norms_changes_nothing():
    base = tiny_base()
    domain = trained(base, norms="shared")
    before = logits(base, domain)
    domain.reestimate_norms(base, [batch()[0]])
    assert torch.equal(logits(base, domain), before)


class Counting(nn.Module):
    """A layer that writes to a buffer of its own in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x


def test_no_buffer_of_the_base_is_written_even_by_layers_that_are_no_norms():
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, 4), Counting(), nn.ReLU(), nn.Linear(4, 2))
    base = pm.load_base(net, input=SPEC)
    domain = pm.new_domain(base, "affine-full", ["a", "b"])
    train(base, domain)
    assert net[2].calls == 0
    base.verify()


def test_parameters_are_grouped_for_two_optimisers():
    base = tiny_base()
    domain = pm.new_domain(base, "affine-full", ["a", "b"])
    groups = domain.param_groups()
    assert list(groups) == ["transforms", "weights", "norms", "head"]
    assert groups["weights"] == []
    assert len(groups["head"]) == 2
    assert len(groups["norms"]) == 2 * len(base.norms)
    together = [id(p) for group in groups.values() for p in group]
    assert sorted(together) == sorted(id(p) for p in domain.parameters())


def test_a_domain_models_parameters_are_exactly_the_domains():
    base = tiny_base()
    domain = pm.new_domain(base, "affine-full", ["a", "b"])
    model = pm.DomainModel(base, domain)
    assert {id(p) for p in model.parameters()} == {id(p) for p in domain.parameters()}
    assert all(p.requires_grad for p in model.parameters())
    assert all(name.startswith("domain.") for name in model.state_dict())


def test_moving_a_domain_model_moves_the_base_with_it():
    base = tiny_base()
    model = pm.DomainModel(base, pm.new_domain(base, "affine-full", ["a", "b"])).double()
    assert base.tensor("stem.weight").dtype == torch.float64
    assert model(batch()[0].double()).dtype == torch.float64


def test_a_domain_refuses_another_base():
    domain = trained(tiny_base())
    with pytest.raises(pm.DomainError, match=r"made for base tiny .* use the base that"):
        domain(tiny_base(seed=1), batch()[0])


def test_a_domain_without_classes_gives_features():
    base = tiny_base()
    domain = pm.new_domain(base, "affine-full").eval()
    assert domain.head is None
    assert domain(base, batch()[0]).shape == (8, 12)
    assert domain.merged(base)(batch()[0]).shape == (8, 12)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([], "classes must be a list"),
        (["a", ""], "classes must be a list"),
        ("ab", "classes must be a list"),
        (["a", 3], "classes must be a list"),
        (["a", "b", "a"], "distinct; a occur twice"),
    ],
)
def test_senseless_classes_are_refused(classes, message):
    with pytest.raises(pm.DomainError, match=message):
        pm.new_domain(tiny_base(), "affine-full", classes)


def test_a_head_needs_one_feature_vector_an_image():
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    base = pm.load_base(net, input=SPEC)
    with pytest.raises(pm.DomainError, match="does not give one feature vector an image"):
        pm.new_domain(base, "affine-full", ["a", "b"])


def test_options_go_with_a_methods_name_only():
    method = pm.create_method("affine-full")
    with pytest.raises(pm.DomainError, match=r"\['k1'\] go with a method's name"):
        pm.new_domain(tiny_base(), method, ["a"], k1=0.0)


def test_the_head_of_a_base_without_classifier_stands_behind_the_merged_network():
    base = tiny_base(classifier=None)
    domain = trained(base)
    merged = domain.merged(base)
    with torch.no_grad():
        assert torch.equal(merged(batch()[0]), logits(base, domain))
