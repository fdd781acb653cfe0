"""CovNorm: two stages of training, and what is stored after the second."""

import dataclasses
import math
import signal

import pytest
import torch
import torch.nn.functional as F

import polymask as pm
from methods.test_covnorm import CLASSES, following, learned, transforms
from nets import batch, tiny_base
from polymask.accounting import component_bits
from polymask.errors import InterruptedTraining
from polymask.methods.series_adapter import Adapter
from polymask.recipes import Recipe
from polymask.train import Listener, fit
from test_train import TRAIN, VAL, StopAt, same

RECIPE = Recipe(epochs=4, rate=3e-3, head_rate=1e-2, drops=(), batch_size=8)
NAMES = ("mini", "colouring", "whitening", "centre", "shift")


def test_training_has_two_stages_and_the_second_learns_the_mini_adapters_alone():
    base = tiny_base()
    torch.manual_seed(0)
    domain = pm.new_domain(base, "covnorm", CLASSES, sites="conv")
    seen = []

    class Watching(Listener):
        def epoch(self, record, seconds):
            some = transforms(domain)["plain.weight"]
            seen.append({n: t.detach().clone() for n, t in some.state_dict().items()})

    history = fit(base, domain, TRAIN, VAL, RECIPE, listener=Watching())
    assert [record.epoch for record in history] == list(range(4))  # one budget for both stages
    assert ["adapter" in state for state in seen] == [True] * 2 + [False] * 2
    before, after = seen[-2:]
    assert {name: torch.equal(before[name], after[name]) for name in NAMES} == {
        "mini": False, "colouring": True, "whitening": True, "centre": True, "shift": True,
    }  # fmt: skip
    assert domain.method.ranks.keys() == transforms(domain).keys()
    assert not any(p.requires_grad for p in domain.parameters())
    base.verify()


def test_it_learns_in_both_stages():
    base = tiny_base()
    torch.manual_seed(0)
    domain = pm.new_domain(base, "covnorm", CLASSES, sites="conv")
    recipe = dataclasses.replace(RECIPE, epochs=24, selection="last")
    history = fit(base, domain, TRAIN, VAL, recipe)
    assert history[11].loss < history[0].loss - 0.4
    assert history[-1].loss < history[11].loss + 0.05
    assert history[-1].val_accuracy > 90


@pytest.mark.parametrize("place", [(0, 2), (1, 4), (2, 2), (3, 1)])
def test_a_run_that_is_stopped_in_either_stage_resumes_to_the_bit(tmp_path, place):
    base = tiny_base()

    def fresh():
        torch.manual_seed(0)
        return pm.new_domain(base, "covnorm", CLASSES)

    whole = fresh()
    expected = fit(base, whole, TRAIN, VAL, RECIPE)
    checkpoint = tmp_path / "c.safetensors"
    with pytest.raises(InterruptedTraining):
        fit(base, fresh(), TRAIN, VAL, RECIPE, checkpoint=checkpoint,
            listener=StopAt(*place, signal.SIGTERM))  # fmt: skip
    resumed = fresh()
    assert fit(base, resumed, TRAIN, VAL, RECIPE, checkpoint=checkpoint, resume=True) == expected
    assert same(whole, resumed)
    assert resumed.method == whole.method


def test_a_compressed_domain_is_saved_merged_and_loaded_bit_exactly(tmp_path):
    base = tiny_base()
    domain = following(base, learned(base, torch.float32)).eval()
    images, _ = batch()
    with torch.no_grad():
        expected = domain(base, images)
        assert torch.equal(domain.frozen()(base, images), expected)
        assert torch.equal(domain.merged(base)(images), expected)
        domain.save(tmp_path / "d.safetensors")
        loaded = pm.load_domain(tmp_path / "d.safetensors", base)
        assert torch.equal(loaded(base, images), expected)
    assert loaded.method == domain.method
    assert set(loaded.method.ranks.values()) == set(domain.method.ranks.values())
    stored = transforms(loaded)["plain.weight"].stored()
    rank = min(domain.method.ranks["plain.weight"])
    assert {n: tuple(t.shape) for n, t in stored.items()} == {
        "up": (1, 16, rank), "down": (1, rank, 16), "offset": (1, 16, 1),
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [(3, 5), (5, 3), (4, 4)])
def test_the_stored_form_gives_the_same_weights_to_the_bit(ranks):
    base = tiny_base()
    domain = pm.new_domain(base, "covnorm", CLASSES, sites="conv", ranks={"plain.weight": ranks})
    mini = transforms(domain)["plain.weight"]
    with torch.no_grad():
        for name in NAMES:
            getattr(mini, name).normal_()
    W, b = base.tensor("plain.weight"), base.tensor("plain.bias")
    C, M, white = mini.colouring[0].double(), mini.mini[0].double(), mini.whitening[0].double()
    A = (C @ M @ white).detach()
    expected = W.double() + torch.einsum("oc,cihw->oihw", A, W.double())
    offset = mini.shift[0, :, 0].double() - (C @ M @ mini.centre[0].double())[:, 0].detach()
    before = mini.weight(W).detach(), mini.bias(b).detach()
    torch.testing.assert_close(before[0].double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(before[1].double(), b + A @ b.double() + offset, rtol=0, atol=1e-4)
    mini.restore(mini.stored())
    assert torch.equal(mini.weight(W), before[0])
    assert torch.equal(mini.bias(b), before[1])
    assert mini.mini is None


def test_a_domain_made_with_ranks_starts_at_the_base_and_learns():
    base = tiny_base()
    domain = pm.new_domain(base, "covnorm", CLASSES, ranks={"stem.weight": (3, 2)})
    images, labels = batch()
    with torch.no_grad():
        features = domain.eval().features(base, images)
        torch.testing.assert_close(features, base.net(images), rtol=0, atol=1e-6)
    F.cross_entropy(domain.train()(base, images), labels).backward()
    assert transforms(domain)["stem.weight"].mini.grad.any()
    assert isinstance(transforms(domain)["grouped.weight"], Adapter)


def test_adapters_that_learned_nothing_are_compressed_to_nothing():
    base = tiny_base()
    domain = pm.new_domain(base, "covnorm", CLASSES).frozen()
    after = following(base, domain)
    assert all(math.isfinite(t.abs().max()) for t in after.state_dict().values())
    images, _ = batch()
    with torch.no_grad():
        expected = domain(base, images)
        torch.testing.assert_close(after.eval()(base, images), expected, rtol=0, atol=1e-5)


def test_there_is_no_third_stage():
    base = tiny_base()
    after = following(base, learned(base, torch.float32)).frozen()
    assert following(base, after) is None


def test_the_second_stage_makes_a_domain_smaller():
    base = tiny_base()
    before = learned(base, torch.float32, energy=0.5)
    after = following(base, before)
    sizes = [sum(component_bits(d).values()) for d in (before, after)]
    assert sizes[1] < sizes[0]
