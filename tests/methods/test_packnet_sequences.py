"""PackNet: several domains in a row, cut and resumed, in either order."""

import os
import signal
from dataclasses import replace

import pytest
import torch

import polymask as pm
from methods.test_packnet import CLASSES, RECIPE, Patterns, learn, learned_sequence, packed
from nets import logits, tiny_base
from polymask.errors import InterruptedTraining
from polymask.methods.packnet import BASE, PackNet, smallest
from polymask.sequence import Lesson, fit_all
from polymask.train import Listener, fit


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def sequence(base):
    return learned_sequence(base)


class StopAt(Listener):
    def __init__(self, epoch, step):
        self.place = (epoch, step)

    def step(self, epoch, step, loss, images, density):
        if (epoch, step) == self.place:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_stopped_after_pruning_resumes_to_the_bit(base, sequence, tmp_path):
    first, method = sequence[0][0], PackNet(name="packnet", capacity=4)
    whole, file = sequence[0][1], tmp_path / "c"
    for listener in (StopAt(3, 1), None):  # epoch 3 is the first after pruning
        torch.manual_seed(0)
        domain = pm.new_domain(base, method.after([first]), CLASSES)
        method.follow(domain, [first])
        data = (base, domain, Patterns(2), Patterns(2, 1), RECIPE)
        if listener is None:
            fit(*data, checkpoint=file, resume=True)
        else:
            with pytest.raises(InterruptedTraining):
                fit(*data, checkpoint=file, listener=listener)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(domain.state_dict()[name], tensor)


def lessons():
    return {
        name: Lesson(CLASSES, Patterns(seed), Patterns(seed, 1), Patterns(seed, 1))
        for seed, name in enumerate(("one", "two", "three"), start=1)
    }


@pytest.mark.parametrize("order", [["one", "two", "three"], ["three", "two", "one"]])
def test_domains_learn_in_either_order_and_nobody_forgets(base, order, tmp_path):
    recipe = replace(RECIPE, epochs=16, weight_rate=1e-2)
    method = PackNet(name="packnet", prune_base=0.5)
    fitted = fit_all(base, lessons(), method, recipe, order=order, folder=tmp_path)
    assert [fitted.domains[name].method.place for name in order] == [1, 2, 3]
    assert all(accuracy > 60 for accuracy in fitted.final.values())  # 33 is chance
    assert set(fitted.forgotten.values()) == {0.0}
    one = packed(fitted.domains["one"]).values()
    two = packed(fitted.domains["two"]).values()
    assert all(a.values is b.values for a, b in zip(one, two, strict=True))
    for name, domain in fitted.domains.items():
        learned = pm.load_domain(tmp_path / "learned" / f"{name}.safetensors", base)
        settled = pm.load_domain(tmp_path / f"{name}.safetensors", base)
        expected = logits(base, domain)
        assert torch.equal(logits(base, learned), expected)
        assert torch.equal(logits(base, settled), expected)


def test_the_order_decides_who_owns_what(base, sequence):
    method, domains = PackNet(name="packnet", capacity=4), []
    for seed in (3, 2, 1):
        domains.append(learn(base, method, list(domains), seed))
    forth, back = packed(sequence[0][-1]), packed(domains[-1])
    assert any(not torch.equal(forth[site].owner, back[site].owner) for site in forth)
    assert all(torch.equal(forth[s].owner == BASE, back[s].owner == BASE) for s in forth)


def test_the_bases_own_images_train_it_first_and_what_it_became_is_told(base):
    own = Lesson([f"class {i}" for i in range(10)], Patterns(9, classes=10), Patterns(9, 1, 10))
    method = PackNet(name="packnet", capacity=3)
    one = {"one": lessons()["one"]}
    recipe = replace(RECIPE, epochs=2)
    without, with_own = (fit_all(base, one, method, recipe, own=o) for o in (None, own))
    for fitted, is_trained in ((without, False), (with_own, True)):
        domain = fitted.domains["one"]
        moved = method.moved(base, [domain])
        assert moved.keys() == packed(domain).keys()
        for site, transform in domain.named_transforms():
            W, kept = base.tensor(site), transform.owner == BASE
            share = 0.0 if base.sites[site].depthwise else 0.5 if is_trained else 0.25
            assert torch.equal(kept, ~smallest(W, torch.ones_like(kept), share))
            assert (moved[site][~kept] == 0).all()
            assert torch.equal(moved[site], W * kept) != is_trained
    assert 0 < without.base.change < 1
    assert with_own.base.accuracy_after is not None
    base.verify()
