"""Heads that begin at 0, on features around their mean."""

import dataclasses
import signal

import pytest
import torch
from torch import nn

import polymask as pm
from nets import block_base, logits, tiny_base
from polymask.conversion.refine import train_on
from polymask.core.heads import SIZE, CentredLinear
from polymask.errors import InterruptedTraining
from polymask.train.descent import FIRST, begin_head
from polymask.train.fit import Listener, fit
from polymask.train.fit_all import Lesson, fit_all
from polymask.train.learn import Loaders
from short_training import RECIPE, TRAIN, VAL, Fixed, StopAt, fresh, same

LESSONS = {name: Lesson(list("abc"), TRAIN, VAL) for name in ("one", "two")}
CENTRED = dataclasses.replace(RECIPE, head_start="centred")


@pytest.mark.parametrize("norms", ["own", "shared"])
def test_it_begins_at_zero_around_the_mean_of_the_features_that_training_sees(norms):
    base, many = tiny_base(), Fixed(FIRST // 8 + 5)
    for module in base.net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    domain = pm.new_domain(base, "affine-full", list("abc"), norms=norms)
    before = {name: buffer.clone() for name, buffer in domain.named_buffers()}
    begin_head(base, domain, many.batches())
    first = [images for images, _ in many.batches()][: FIRST // 8]
    after = dict(domain.named_buffers())
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())  # nothing is noted of them
    assert not logits(base, domain).any()
    by_the_base = base.net(torch.cat(first)).mean(0)
    with domain.in_mode(training=True), torch.no_grad():
        in_training = torch.cat([domain.features(base, images) for images in first]).mean(0)
    assert torch.allclose(domain.head.middle, in_training, atol=1e-6)
    assert torch.allclose(in_training, by_the_base, atol=1e-6) is (norms == "shared")


@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
def test_a_step_moves_logits_as_much_whatever_the_size_of_features(size):
    torch.manual_seed(0)
    features, labels = size * torch.rand(64, 200), torch.arange(64) % 2
    head = CentredLinear.around(features, 2, torch.float32)
    optimiser = torch.optim.Adam(head.parameters(), lr=1e-3)
    nn.functional.cross_entropy(head(features), labels).backward()
    optimiser.step()
    assert 0.01 < float(head(features).detach().abs().mean()) < 1.0  # at most rate × SIZE
    assert float(((features - head.middle) / head.unit).abs().sum(1).mean()) == pytest.approx(SIZE, rel=1e-4)


def test_features_that_are_the_same_for_all_images_do_no_harm():
    head = CentredLinear.around(torch.ones(8, 5), 3, torch.float32)
    assert head(torch.ones(2, 5)).isfinite().all()


def test_a_step_of_adam_leaves_alone_what_all_images_share():
    torch.manual_seed(0)
    features, labels = 1 + 0.1 * torch.rand(64, 200), torch.arange(64) % 2
    moved = []
    for head in (nn.Linear(200, 10), CentredLinear(features.mean(0), 1.0, 10, torch.float32)):
        before = head(features).detach()
        optimiser = torch.optim.Adam(head.parameters(), lr=1e-3)
        nn.functional.cross_entropy(head(features), labels).backward()
        optimiser.step()
        moved.append((head(features).detach() - before).mean(0).abs().max())
    plain, centred = moved
    assert plain > 0.15  # the rate times the sum of 200 features: 0.2
    assert centred < 0.01


@pytest.mark.parametrize("method", ["affine-full", "finetune", "classifier-only", "tsa", "bitdelta"])
def test_what_is_stored_is_a_plain_head_that_says_the_same(method, tmp_path):
    base, said = block_base(), []
    domain = fresh(base, method)

    class Watch(Listener):
        def epoch(self, record, seconds):
            with domain.in_mode(training=False):
                said.append(logits(base, domain))

    fit(base, domain, TRAIN, VAL, dataclasses.replace(CENTRED, selection="last"), listener=Watch())
    assert type(domain.head) is nn.Linear
    torch.testing.assert_close(logits(base, domain), said[-1], rtol=1e-4, atol=1e-3)
    domain.save(tmp_path / "d.safetensors")
    loaded = pm.load_domain(tmp_path / "d.safetensors", base)
    assert torch.equal(logits(base, loaded), logits(base, domain))


def test_folding_changes_nothing_but_rounding():
    torch.manual_seed(0)
    head, features = CentredLinear(torch.rand(50), 0.3, 7, torch.float32), torch.rand(20, 50)
    nn.init.normal_(head.weight)
    nn.init.normal_(head.bias)
    assert torch.allclose(nn.functional.linear(features, *head.folded()), head(features), atol=1e-5)


@pytest.mark.parametrize("method", ["affine-full", "bitdelta"])
@pytest.mark.parametrize("place", [(0, 2), (2, 3)])
def test_a_stopped_run_resumes_to_the_bit(tmp_path, method, place):
    base = block_base()
    whole, checkpoint = fresh(base, method), tmp_path / "c.safetensors"
    expected = fit(base, whole, TRAIN, VAL, CENTRED)
    with pytest.raises(InterruptedTraining):
        fit(base, fresh(base, method), TRAIN, VAL, CENTRED, checkpoint=checkpoint,
            listener=StopAt(*place, signal.SIGTERM))  # fmt: skip
    resumed = fresh(base, method)
    assert fit(base, resumed, TRAIN, VAL, CENTRED, checkpoint=checkpoint, resume=True) == expected
    assert same(resumed, whole)


def test_only_the_first_stage_begins_the_head():
    assert CENTRED.stage(0.0, 0.5).head_start == "centred"
    assert CENTRED.stage(0.5, 0.5).head_start is None


def test_domains_that_learn_together_begin_so_too():
    base = block_base()
    drawn, centred = (fit_all(base, LESSONS, "mtan", recipe).domains["one"].head for recipe in (RECIPE, CENTRED))
    assert not torch.equal(drawn.weight, centred.weight)


def test_a_head_that_knows_something_is_not_begun_anew(monkeypatch):
    base, begun = block_base(), []
    monkeypatch.setattr("polymask.train.fit.begin_head", lambda base, domain, batches: begun.append(domain.classes))
    own = Lesson(list("abcdefghij"), TRAIN, VAL)
    fit_all(base, LESSONS, "lwf", CENTRED, own=own)
    assert begun == [list("abc"), list("abc")]
    domain = fresh(base)
    train_on(base, domain, Loaders(TRAIN, VAL, None), CENTRED, seed=0)
    assert len(begun) == 2


def test_an_unknown_start_is_refused():
    with pytest.raises(pm.PolymaskError, match="head_start='random' is not one of drawn, centred"):
        pm.get_recipe("quick", head_start="random")
