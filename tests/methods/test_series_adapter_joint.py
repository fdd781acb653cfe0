"""Series adapters whose network learns with them: from all domains, or from the base's images."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import polymask as pm
from image_folders import make_folder
from nets import batch, tiny_base
from polymask.benchmarks.jobs import BaseName
from polymask.benchmarks.planning import Request, make_plan
from polymask.benchmarks.suites import Protocol, find_suite
from polymask.core.network import copy_with
from polymask.methods.series_adapter import AdaptedSharedLayer, SharedLayer
from polymask.train.fit import fit
from polymask.train.fit_all import Lesson, fit_all
from polymask.train.learn import learn
from polymask.train.recipe import Recipe, get_recipe
from short_training import VAL, Fixed

JOINT, AFTER = "series-adapter-joint", "series-adapter-n"
RECIPE = Recipe(epochs=3, rate=3e-3, weight_rate=1e-3, head_rate=1e-2, drops=(), batch_size=8)
CLASSES = ["a", "b", "c"]


def transforms(domain):
    return dict(domain.named_transforms())


def lessons(**offsets):
    return {n: Lesson(CLASSES, Fixed(4, o), Fixed(1, o + 50)) for n, o in offsets.items()}


def moved_domain(base, method=JOINT, seed=0):
    """A domain whose D, adapters and norms are not where they start."""
    torch.manual_seed(seed)
    domain = pm.new_domain(base, method, CLASSES)
    with torch.no_grad():
        for transform in transforms(domain).values():
            transform.delta.normal_(0, 0.1)
            if isinstance(transform, AdaptedSharedLayer):
                transform.running_mean.normal_(0, 0.5)
                transform.running_var.uniform_(0.5, 2)
    return domain


@pytest.mark.parametrize("method", [JOINT, AFTER])
@pytest.mark.parametrize("training", [False, True])
def test_it_is_series_adapters_on_a_base_with_moved_weights(method, training):
    base = tiny_base()
    domain = moved_domain(base, method)
    moved = domain.method.moved(base, [domain])
    other = pm.load_base(copy_with(base.net, moved), input=base.input, classifier=None)
    plain = pm.new_domain(other, "series-adapter", CLASSES)
    with torch.no_grad():
        for name, transform in transforms(plain).items():
            given = transforms(domain)[name]
            for leaf, tensor in transform.stored().items():
                tensor.copy_(given.stored()[leaf])
    plain.head.load_state_dict(domain.head.state_dict())
    images, labels = batch()
    base.net.dropout.p = other.net.dropout.p = 0.0
    found = domain.train(training)(base, images)
    expected = plain.train(training)(other, images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    base.verify()

    F.cross_entropy(found, labels).backward()
    deltas = [t.delta for t in transforms(domain).values()]
    assert all((d.grad is not None and bool(d.grad.any())) == (method == JOINT) for d in deltas)


def test_every_site_is_moved_and_those_that_can_be_are_adapted():
    base = tiny_base()
    found = transforms(pm.new_domain(base, JOINT, CLASSES))
    assert found.keys() == base.sites.keys()
    assert {n for n, t in found.items() if type(t) is SharedLayer} == {
        "plain.weight",
        "hidden.weight",
    }
    W = base.tensor("hidden.weight")
    with torch.no_grad():
        found["hidden.weight"].delta.fill_(0.5)
        assert torch.equal(found["hidden.weight"].weight(W), W + 0.5)


def test_moved_weights_learn_at_the_rate_of_weights():
    base = tiny_base()
    groups = pm.new_domain(base, JOINT, CLASSES).param_groups()
    assert [tuple(p.shape) for p in groups["weights"]] == [s.shape for s in base.sites.values()]
    assert len(groups["transforms"]) == 3 * 3
    fixed = pm.new_domain(base, AFTER, CLASSES)
    assert not fixed.param_groups()["weights"]
    assert "delta" in dict(transforms(fixed)["stem.weight"].named_buffers())


def test_domains_learned_together_share_what_was_moved_and_nothing_else():
    base = tiny_base()
    fitted = fit_all(base, lessons(one=0, two=7, three=9), JOINT, RECIPE)
    first, *others = (transforms(domain) for domain in fitted.domains.values())
    for other in others:
        for name, transform in other.items():
            assert torch.equal(transform.delta, first[name].delta)
            assert transform.delta.any()
            if isinstance(transform, AdaptedSharedLayer):
                assert not torch.equal(transform.adapter, first[name].adapter)
                assert not torch.equal(transform.running_mean, first[name].running_mean)
    assert fitted.base.change > 0
    base.verify()


def test_tied_domains_learn_one_tensor():
    base = tiny_base()
    domains = [pm.new_domain(base, JOINT, CLASSES) for _ in range(3)]
    domains[0].method.tie(domains)
    for name, first in transforms(domains[0]).items():
        assert all(transforms(d)[name].delta is first.delta for d in domains[1:])
        assert isinstance(first.delta, torch.nn.Parameter)
    assert len({id(p) for d in domains for p in d.param_groups()["weights"]}) == len(base.sites)


def test_what_was_moved_is_what_the_layers_work_with_to_the_bit():
    base = tiny_base()
    fitted = fit_all(base, lessons(one=0, two=7), JOINT, RECIPE)
    method = pm.create_method(JOINT)
    moved = method.moved(base, list(fitted.domains.values()))
    for domain in fitted.domains.values():
        used = domain.train().weights(base)
        assert all(torch.equal(used[name], tensor) for name, tensor in moved.items())
        domain.eval()


def test_moved_weights_take_a_place_that_the_base_has_anyway():
    base = pm.load_base("decathlon-resnet26", pretrained=False, device="meta")
    plain = pm.account(base, "series-adapter", domains=10)
    for method in (JOINT, AFTER):
        account = pm.account(base, method, domains=10)
        assert account.components["moved"] == 5_806_944 * 32
        assert account.params_paper == plain.params_paper
        assert account.params_stored == plain.params_stored


@pytest.mark.parametrize("inherit", ["norms", "adapters"])
def test_a_domain_that_follows_takes_over_what_was_pretrained(inherit):
    base = tiny_base()
    own = moved_domain(base)
    fit(base, own, Fixed(), VAL, RECIPE)
    new = pm.new_domain(base, AFTER, ["x", "y"], inherit=inherit)
    adapted = {n: t for n, t in transforms(new).items() if isinstance(t, AdaptedSharedLayer)}
    drawn = {n: t.adapter.clone() for n, t in adapted.items()}
    new.method.follow(new, [own])
    for name, transform in transforms(new).items():
        before = transforms(own)[name].stored()
        for leaf, tensor in transform.stored().items():
            expected = drawn[name] if leaf == "adapter" and inherit == "norms" else before[leaf]
            assert torch.equal(tensor, expected)
    for name, norm in new.named_norms():
        theirs = dict(own.named_norms())[name].tensors()
        assert all(torch.equal(tensor, theirs[leaf]) for leaf, tensor in norm.tensors().items())
    images, _ = batch()
    with torch.no_grad():
        same = torch.equal(new.eval().features(base, images), own.features(base, images))
    assert same == (inherit == "adapters")


def test_a_domain_with_nothing_to_follow_is_on_the_base_as_it_is():
    base = tiny_base()
    earlier = pm.new_domain(base, AFTER, CLASSES).frozen()
    torch.manual_seed(3)
    domain = pm.new_domain(base, AFTER, CLASSES)
    before = {name: tensor.clone() for name, tensor in domain.state_dict().items()}
    domain.method.follow(domain, [earlier])
    assert all(torch.equal(tensor, before[n]) for n, tensor in domain.state_dict().items())
    assert not any(t.delta.any() for t in transforms(domain).values())


def test_a_domain_cannot_follow_one_with_other_norms_or_sites():
    base = tiny_base()
    domain = pm.new_domain(base, AFTER, CLASSES)
    for options in ({"norms": "affine"}, {"sites": "conv"}):
        own = pm.new_domain(base, JOINT, CLASSES, **options).frozen()
        with pytest.raises(pm.MethodError, match="cannot follow one with other norms or sites"):
            domain.method.follow(domain, [own])


def test_the_base_is_pretrained_on_its_own_images_and_then_fixed(tmp_path):
    base = tiny_base()
    own = Lesson([f"class {i}" for i in range(10)], Fixed(4, 30), Fixed(1, 80))
    fitted = fit_all(base, lessons(one=0, two=7), AFTER, RECIPE, own=own, folder=tmp_path)
    assert fitted.base.change > 0
    one, two = (transforms(domain) for domain in fitted.domains.values())
    pretrained = pm.load_domain(tmp_path / "learned" / "own.safetensors", base)
    assert pretrained.method.name == JOINT
    for name, transform in transforms(pretrained).items():
        assert transform.delta.any()
        assert torch.equal(one[name].delta, transform.delta)
        assert torch.equal(two[name].delta, transform.delta)
    images, _ = batch()
    for name, domain in fitted.domains.items():
        loaded = pm.load_domain(tmp_path / f"{name}.safetensors", base)
        with torch.no_grad():
            assert torch.equal(loaded(base, images), domain(base, images))
    base.verify()


@pytest.mark.parametrize("method", [JOINT, AFTER])
def test_it_learns(method):
    base = tiny_base()
    recipe = dataclasses.replace(RECIPE, epochs=15)
    own = Lesson([f"class {i}" for i in range(10)], Fixed(4, 30), Fixed(1, 80))
    fitted = fit_all(base, lessons(one=0, two=7), method, recipe, own=own, sites="conv")
    assert all(h[-1].loss < h[0].loss - 0.2 for h in fitted.histories.values())


def test_without_the_bases_own_images_it_is_refused_before_anything_is_learned(tmp_path, monkeypatch):
    base, message = tiny_base(), "series-adapter-n trains the base on its own images first"
    with pytest.raises(pm.MethodError, match=message):
        fit_all(base, lessons(one=0), AFTER, RECIPE, folder=tmp_path / "packs")
    assert not (tmp_path / "packs").exists()
    make_folder(tmp_path / "data" / "apples")
    with pytest.raises(pm.MethodError, match=message):
        learn(base, str(tmp_path / "data" / "apples"), AFTER, "quick")
    monkeypatch.setattr("polymask.benchmarks.planning.load_base", lambda *_, **__: base)
    request = Request(
        suite=find_suite(str(tmp_path / "data"), None),
        base=BaseName("tiny"),
        methods=("bn-only", AFTER),
        seeds=(0,),
        protocol=Protocol(get_recipe("quick", side=32, epochs=1)),
        out=tmp_path / "out",
    )
    with pytest.raises(pm.MethodError, match=message):
        make_plan(request)
    assert not (tmp_path / "out").exists()


def test_the_options_of_pretraining_are_those_of_the_domains():
    method = pm.create_method(AFTER, sites="spatial", decay=0.1, norm_momentum=0.5)
    theirs = method.for_base()
    assert (theirs.name, theirs.sites, theirs.decay) == (JOINT, "spatial", 0.1)
    assert theirs.norm_momentum == 0.5


def test_a_senseless_inheritance_is_refused_by_name():
    with pytest.raises(pm.MethodError, match="inherit='all' is not one of norms, adapters"):
        pm.create_method(AFTER, inherit="all")
