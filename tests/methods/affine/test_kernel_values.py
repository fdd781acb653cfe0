"""Compiled kernels give what eager ones give, and training ends where it would have ended.

Most tests run the compiled kernels' own arithmetic without a compiler (`fused`), which takes no
time; the slow ones compile it.
"""

import dataclasses
import os
import signal

import pytest
import torch
import torch.nn.functional as F

import polymask as pm
from nets import batch, logits, tiny_base, tiny_net, train, trained
from polymask.methods.affine.method import PRESETS
from polymask.train.fit import Listener
from short_training import RECIPE, TRAIN, VAL, fresh, same

TOGETHER = [name for name, preset in PRESETS.items() if preset.per == "layer"]


def worn(method="affine-full", **options):
    """A domain on the tiny base with scalars that are not zero, and the base."""
    base = tiny_base()
    torch.manual_seed(0)
    domain = pm.new_domain(base, method, ["a", "b", "c"], **options)
    with torch.no_grad():
        for parameter in domain.transforms.parameters():
            parameter.normal_(0, 0.1)
    return base, domain


@pytest.mark.parametrize("method", TOGETHER)
def test_fused_weights_are_the_eager_ones_to_the_bit_in_both_forms(fused, method, storages):
    base, domain = worn(method)
    forms = [domain, domain.frozen()]
    expected = [{n: w.detach().clone() for n, w in d.weights(base).items()} for d in forms]
    fused()
    for form, weights in zip(forms, expected, strict=True):
        assert form.method.together(base, form).keys() == base.sites.keys()
        found = form.weights(base)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
        assert len(storages(form)) == 1
    base.verify()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("method", TOGETHER)
def test_fused_gradients_are_the_eager_ones_but_for_rounding(fused, method, layout):
    base, domain = worn(method)
    domain.to(memory_format=layout)
    torch.manual_seed(1)
    gradients = {name: torch.randn(site.shape) for name, site in base.sites.items()}

    def backward():
        domain.zero_grad()
        weights = domain.weights(base)
        sum((weights[name] * g).sum() for name, g in gradients.items()).backward()
        learned = domain.transforms.named_parameters()
        return {name: p.grad.clone() for name, p in learned}

    expected = backward()
    fused()
    found = backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"per": "channel"}, {}])
def test_what_cannot_be_fused_is_computed_site_by_site(fused, options):
    net = tiny_net() if options else tiny_net().double()
    spec = pm.InputSpec((3, 16, 16), (0.5,) * 3, (0.5,) * 3)
    base = pm.load_base(net, input=spec)
    domain = pm.new_domain(base, "affine-full", ["a", "b"], **options)
    expected = domain.weights(base)
    fused()
    assert domain.method.together(base, domain) == {}
    found = domain.weights(base)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_training_with_fused_weights_ends_where_eager_training_ends(fused):
    base = tiny_base()
    recipe = dataclasses.replace(RECIPE, epochs=4, drops=())
    ends = []
    for _ in range(2):
        domain = fresh(base)
        history = pm.fit(base, domain, TRAIN, VAL, recipe)
        ends.append((domain, history))
        fused()
    (eager, before), (quick, after) = ends
    assert [r.val_accuracy for r in after] == [r.val_accuracy for r in before]
    assert after[-1].loss == pytest.approx(before[-1].loss, rel=1e-3)
    torch.testing.assert_close(logits(base, quick), logits(base, eager), rtol=0, atol=1e-2)
    base.verify()


def test_an_optimiser_made_before_the_first_pass_trains_what_is_moved(fused):
    base, losses = tiny_base(), []
    for _ in range(2):
        torch.manual_seed(0)
        domain = pm.new_domain(base, "affine-full", ["a", "b", "c"])
        learned = [id(p) for p in domain.parameters()]
        losses.append(train(base, domain, steps=6, rate=1e-2))
        assert [id(p) for p in domain.parameters()] == learned
        fused()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("place", [(0, 2), (1, 3)])
def test_a_run_with_fused_weights_that_was_cut_resumes_to_the_bit(fused, tmp_path, place):
    class Stopper(Listener):
        def step(self, epoch, step, loss, images, density):
            if (epoch, step) == place:
                os.kill(os.getpid(), signal.SIGTERM)

    fused()
    base, checkpoint = tiny_base(), tmp_path / "checkpoint.safetensors"
    whole = fresh(base)
    pm.fit(base, whole, TRAIN, VAL, RECIPE)
    cut = fresh(base)
    with pytest.raises(pm.InterruptedTraining):
        pm.fit(base, cut, TRAIN, VAL, RECIPE, checkpoint=checkpoint, listener=Stopper())
    again = fresh(tiny_base())
    pm.fit(base, again, TRAIN, VAL, RECIPE, checkpoint=checkpoint, resume=True)
    assert same(whole, again)


def test_domains_that_learn_in_turn_on_one_base_are_as_if_alone(fused):
    fused()
    alone = [trained(tiny_base(), method, seed=2) for method in ("affine-full", "piggyback")]
    base = tiny_base()
    in_turn = [trained(base, method, seed=2) for method in ("affine-full", "piggyback")]
    for one, other in zip(alone, in_turn, strict=True):
        assert same(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["affine-full", "affine-full-sigmoid", "piggyback"])
def test_compiled_weights_are_the_eager_ones_to_the_bit_and_gradients_nearly(method):
    base, domain = worn(method)
    domain.eval()
    (images, labels), found = batch(), {}
    for kind in ("eager", "compiled"):
        assert pm.set_kernels(kind) == kind
        domain.zero_grad()
        F.cross_entropy(domain(base, images), labels).backward()
        with torch.no_grad():
            made = [d.weights(base) for d in (domain, domain.frozen())]
        found[kind] = (made, [p.grad.clone() for p in domain.transforms.parameters()])
    for one, other in zip(*(weights for weights, _ in found.values()), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    for one, other in zip(*(gradients for _, gradients in found.values()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_training_with_compiled_kernels_ends_where_eager_training_ends():
    base = tiny_base()
    recipe = dataclasses.replace(RECIPE, epochs=8, drops=())
    ends = []
    for kind in ("eager", "compiled"):
        assert pm.set_kernels(kind) == kind
        domain = fresh(base)
        ends.append((pm.fit(base, domain, TRAIN, VAL, recipe), logits(base, domain)))
    (before, expected), (after, found) = ends
    assert [r.val_accuracy for r in after] == [r.val_accuracy for r in before]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2)
