"""The last head, which learns from the images of val too."""

from dataclasses import replace

import pytest
import torch
from torch.utils.data import TensorDataset

import polymask as pm
from brightness import made_base, made_data
from image_folders import make_folder
from polymask.cli import main
from polymask.core.unknown import Unknown
from polymask.data.loader import loader_at
from polymask.report.learn_page import record_learning
from polymask.train import learn, regression
from polymask.train.regression import LastHead, Seen, fit_last_head, gathered, right_ones

RECIPE = pm.get_recipe("quick", epochs=2, batch_size=8, side=24, rate=1e-3, refit="auto")
ALL = pm.get_recipe(RECIPE, refit_on_val=True)


@pytest.fixture(scope="module")
def data():
    return made_data("dark", "light")


@pytest.fixture
def base():
    return made_base()


def trained(base, data):
    recipe = pm.get_recipe(RECIPE, refit=None, precision=32)
    return pm.learn(base, data, "affine-full", recipe, progress=False).domain


def corners(*places, count=8):
    """Features around the given corners of a space of 8 dimensions; their classes are their order."""
    noise = torch.randn(len(places) * count, 8, generator=torch.Generator().manual_seed(0)) / 10
    labels = torch.arange(len(places)).repeat_interleave(count)
    return Seen(torch.eye(8)[list(places)].repeat_interleave(count, 0) + noise, labels)


def test_a_head_learns_from_val_what_train_does_not_show(base):
    domain = pm.new_domain(base, "classifier-only", ["one", "other"])
    train, val = corners(0, 1), corners(2, 3)
    LastHead(50.0, 1e-3, train, train, False).add_val(domain)
    without = right_ones(domain.head, val).float().mean()
    LastHead(50.0, 1e-3, train, val, False).add_val(domain)
    assert right_ones(domain.head, val).all()
    assert without < 1


def test_what_is_said_of_val_is_from_before_val_was_learned_from(base, data, monkeypatch):
    found = []
    monkeypatch.setattr(learn, "fit_last_head", lambda *given: found.append(fit_last_head(*given)) or found[-1])
    domain = pm.learn(base, data, "affine-full", ALL, progress=False).domain
    (last,) = found
    assert domain.metrics["val_accuracy"] == last.reached
    assert domain.metrics["learned_from_val"]
    kept = domain.head.weight.clone()
    last.add_val(domain)
    assert torch.allclose(kept, domain.head.weight, atol=1e-2 * float(kept.abs().max()))  # to 16 bits


def test_nothing_but_the_head_differs(base, data):
    plain, last = (
        pm.learn(base, data, "affine-full", recipe, progress=False).domain.stored() for recipe in (RECIPE, ALL)
    )
    tensors = [name for name in plain if isinstance(plain[name], torch.Tensor) and not name.startswith("unknown/")]
    changed = {name for name in tensors if not torch.equal(plain[name], last[name])}
    assert changed == {"head/weight", "head/bias"}


def test_a_head_that_is_better_on_val_by_more_than_chance_stays(base, data):
    domain = trained(base, data)
    train, val = (gathered(base, domain, loader_at(split, domain.input).batches()) for split in (data.train, data.val))
    good = fit_last_head(base, domain, data, ALL, (train, val))
    before = domain.head.weight.clone()
    wrong = Seen(train.features, 1 - train.labels)
    assert fit_last_head(base, domain, data, ALL, (wrong, val)) is None
    assert torch.equal(domain.head.weight, before)
    assert good.reached == 100


@pytest.mark.parametrize(
    "fields",
    [{"refit_on_val": None}, {"refit_on_val": False}, {"refit": None}, {"train_on_val": True, "selection": "last"}],
)
def test_otherwise_the_head_stays_as_it_is(base, data, fields):
    domain = trained(base, data)
    before = domain.head.weight.clone()
    assert fit_last_head(base, domain, data, pm.get_recipe(ALL, **fields), None) is None
    assert torch.equal(domain.head.weight, before)


def test_more_images_than_memory_may_have_room_for_are_left(base, data, monkeypatch):
    domain = trained(base, data)
    monkeypatch.setattr(regression, "MANY", len(data.train) + len(data.val) - 1)
    assert fit_last_head(base, domain, data, ALL, None) is None


def test_batches_that_are_made_elsewhere_are_learned_as_before(base):
    images = TensorDataset(torch.rand(24, 3, 24, 24), torch.arange(24) % 2)
    domain = pm.learn(base, {"train": images, "val": images}, "bn-only", ALL, classes=["a", "b"]).domain
    assert "learned_from_val" not in domain.metrics


def test_without_test_images_val_is_evaluated_before_it_is_learned_from(base, data, monkeypatch, tmp_path):
    untested = replace(data, test=None)
    recipe = pm.get_recipe(ALL, rate=0.0, head_rate=0.0)
    monkeypatch.setattr(LastHead, "add_val", lambda last, domain: domain.head.weight.zero_())
    learned = pm.learn(base, untested, "bn-only", recipe, progress=False)
    assert not learned.domain.head.weight.any()
    assert learned.evaluation is None
    assert learned.val_evaluation.accuracy == learned.domain.metrics["val_accuracy"] > 50
    learned.domain.save(tmp_path / "made.safetensors")
    loaders = pm.make_loaders(untested, base.input, recipe)
    record = record_learning(learned, base, untested, loaders, tmp_path / "made.safetensors", "bn-only", "command")
    assert (record.split, record.evaluation) == ("val", learned.val_evaluation)


def test_measuring_val_images_says_that_they_were_learned_from(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "images")
    learned = ["learn", "one", "--data", "images", "--side", "32", "--epochs", "1", "--out", "packs"]
    assert main(learned) == 0
    assert "learned from val too" in capsys.readouterr().out
    for split, said in (("val", True), ("test", False)):
        assert main(["evaluate", "one", "--data", "images", "--library", "packs", "--split", split]) == 0
        assert ("not new to it" in capsys.readouterr().err) == said


def test_calibrating_on_the_same_source_keeps_the_temperature_from_before(base):
    data = made_data("dark", "light")
    domain = pm.learn(base, data, "affine-full", ALL, progress=False).domain
    assert domain.unknown is not None
    before = replace(domain.unknown.judgement, temperature=3.0)
    domain.unknown = Unknown(before, dict(domain.unknown.named_buffers()))
    assert pm.calibrate(base, domain, data).temperature == 3.0
    others = replace(made_data("dark", "light"), val=made_data("dark", "light").test)
    assert pm.calibrate(base, domain, others).temperature != 3.0  # other images, whatever they are called
    domain.unknown = Unknown(before, dict(domain.unknown.named_buffers()))
    assert pm.calibrate(base, domain, replace(data, name="moved")).temperature == 3.0
