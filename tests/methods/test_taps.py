"""TAPS: gates of layers, what they let through, and what is stored of closed ones."""

import pytest
import torch

import polymask as pm
from nets import batch, logits, tiny_base
from polymask.core.accounting import component_bits
from polymask.core.merge import WorkingNetwork
from polymask.core.survey import Site
from polymask.methods.taps import Taps
from polymask.train.descent import learned_by, make_optimisers
from polymask.train.fit import fit
from polymask.train.recipe import Recipe
from short_training import TRAIN

CLASSES = ["a", "b", "c"]


def domain_with(base: pm.Base, closed: tuple[str, ...]) -> pm.Domain:
    """Random changes of all sites, some behind closed gates."""
    torch.manual_seed(0)
    domain = pm.new_domain(base, "taps", CLASSES).eval()
    with torch.no_grad():
        for name, transform in domain.named_transforms():
            for parameter in transform.weight_parameters():
                parameter.normal_(0, 0.1)
            transform.score.fill_(0.0999 if name in closed else 0.1)
    return domain


def test_a_gate_lets_a_change_through_from_the_threshold_on_and_its_gradient_is_that_of_its_factor():
    torch.manual_seed(0)
    site = Site("weight", (4, 3), "linear", 1, "bias", True, None, False, torch.float64)
    W, G, b = torch.randn(4, 3).double(), torch.randn(4, 3).double(), torch.randn(4).double()
    for score, is_open in ((0.1, 1.0), (0.3, 1.0), (0.0999, 0.0), (-2.0, 0.0)):
        transform = Taps().transform(site)
        with torch.no_grad():
            transform.delta.normal_()
            transform.delta_bias.normal_()
            transform.score.fill_(score)
        D, d = transform.delta.detach(), transform.delta_bias.detach()
        assert torch.equal(transform.weight(W), W + is_open * D)
        assert torch.equal(transform.bias(b), b + is_open * d)
        (transform.weight(W) * G).sum().backward()
        torch.testing.assert_close(transform.score.grad, (G * D).sum().view(1))  # closed gates too: they may open
        torch.testing.assert_close(transform.delta.grad, is_open * G)


def test_the_loss_has_lambda_times_the_mean_size_of_the_scores():
    base = tiny_base()
    domain = pm.new_domain(base, "taps", CLASSES, sparsity=3.0)
    with torch.no_grad():
        for value, (_, transform) in enumerate(domain.named_transforms()):
            transform.score.fill_(value - 2)  # -2, -1, 0, 1, 2
    term = domain.method.objective(base, domain, lambda: iter(()))(torch.empty(0), torch.empty(0))
    assert term.item() == pytest.approx(3 * 6 / 5)
    term.backward()
    slopes = [transform.score.grad.item() for _, transform in domain.named_transforms()]
    assert slopes == pytest.approx([-0.6, -0.6, 0.0, 0.6, 0.6])
    assert pm.create_method("taps", sparsity=0.0).objective(base, domain, lambda: iter(())) is None


def test_nothing_is_stored_of_a_layer_with_a_closed_gate_and_all_forms_agree(tmp_path):
    base = tiny_base()
    closed = ("stem.weight", "plain.weight")
    domain = domain_with(base, closed)
    frozen = domain.frozen()
    stored = {name.split("/")[1] for name in frozen.stored() if name.startswith("transform/")}
    assert stored == base.sites.keys() - set(closed)
    domain.save(tmp_path / "a.safetensors")
    loaded = pm.load_domain(tmp_path / "a.safetensors", base)
    frozen.frozen().save(tmp_path / "b.safetensors")
    loaded.save(tmp_path / "c.safetensors")
    assert len({(tmp_path / f"{name}.safetensors").read_bytes() for name in "abc"}) == 1
    assert (
        component_bits(frozen)["weights"]
        == component_bits(loaded)["weights"]
        == 32 * sum(site.numel for name, site in base.sites.items() if name not in closed)
    )
    expected, working = logits(base, domain), WorkingNetwork(base)
    with torch.no_grad():
        for form in (frozen, loaded):
            assert torch.equal(logits(base, form), expected)
            assert torch.equal(form.merged(base)(batch()[0]), expected)
            assert torch.equal(working.switch(form)(batch()[0]), expected)
            assert not {*closed, "plain.bias"} & form.weights(base).keys()


def test_a_domain_whose_gates_are_all_closed_is_norms_and_a_head(tmp_path):
    base = tiny_base()
    domain = domain_with(base, tuple(base.sites))
    domain.save(tmp_path / "a.safetensors")
    loaded = pm.load_domain(tmp_path / "a.safetensors", base)
    assert not list(loaded.named_transforms())
    assert torch.equal(logits(base, loaded), logits(base, domain))


def test_a_strong_term_closes_gates_and_none_closes_without_it():
    base = tiny_base()
    recipe = Recipe(epochs=4, rate=1e-2, weight_rate=1e-3, head_rate=1e-2, drops=(), batch_size=8, selection="last")
    for sparsity, expected in ((1e3, 0), (0.0, len(base.sites))):
        torch.manual_seed(0)
        domain = pm.new_domain(base, "taps", CLASSES, sparsity=sparsity, start=0.11)
        if not sparsity:
            for _, transform in domain.named_transforms():
                transform.score.requires_grad_(False)
        fit(base, domain, TRAIN, None, recipe)
        assert sum(transform.is_open for _, transform in domain.named_transforms()) == expected
    base.verify()


def test_changes_learn_as_whole_weights_and_gates_as_scalars():
    base = tiny_base()
    domain = pm.new_domain(base, "taps", CLASSES)
    groups = learned_by([domain], [None])
    assert len(groups["scalars"]) == len(base.sites)
    assert not groups["transforms"]
    rates = {name: o.param_groups[0]["lr"] for name, o in make_optimisers(groups, Recipe(scalar_rate=0.5)).items()}
    assert rates["scalars"] == 0.5
    assert pm.create_method("taps", distance=20).at_rate(1e-3).start == pytest.approx(0.12)


def test_the_most_that_a_domain_takes_is_all_weights():
    base = tiny_base()
    bits = pm.account(base, "taps").components
    assert (bits["weights"], bits["bias"]) == (32 * sum(s.numel for s in base.sites.values()), 32 * (16 + 12))


@pytest.mark.parametrize(
    ("options", "message"), [({"start": 0.05}, "start=0.05 is below threshold=0.1"), ({"sparsity": -1}, "sparsity=-1")]
)
def test_senseless_options_are_refused_by_name(options, message):
    with pytest.raises(pm.MethodError, match=message):
        pm.create_method("taps", **options)
