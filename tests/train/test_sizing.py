"""The size of images at test, chosen on val."""

import math

import numpy as np
import pytest
import torch

import polymask as pm
from brightness import made_base, made_data
from polymask.cli import main
from polymask.data.loader import loader_at
from polymask.errors import PolymaskError, TrainingError
from polymask.train.regression import fit_head
from polymask.train.sizing import Reached, choose_test_input, clearly_better, measured_at, way_of

RECIPE = pm.get_recipe("quick", epochs=2, batch_size=8, side=24)


@pytest.fixture(scope="module")
def data():
    return made_data("dark", "light")


@pytest.fixture
def favourite(monkeypatch, data):
    """Say which (side, crop) is best on val, instead of measuring it."""
    asked, val = [], data.val

    def favour(side, crop):
        def measure(base, domain, images, spec):
            asked.append((spec.side, spec.crop))
            assert images is val
            return Reached(float(spec.side == side) + float(spec.crop == crop))

        monkeypatch.setattr("polymask.train.sizing.measured_at", measure)
        return asked

    return favour


@pytest.mark.parametrize(
    ("side", "crop", "tried"),
    [(24, 0.875, [24, 32, 24]), (32, 0.875, [24, 32, 40, 32]), (40, 1.0, [24, 32, 40, 48, 40])],
)
def test_sides_are_tried_until_one_is_worse_and_the_best_on_val_is_kept(data, favourite, side, crop, tried):
    base = made_base()
    asked = favourite(side, crop)
    domain = pm.new_domain(base, "bn-only", data.classes)
    recipe = pm.get_recipe(RECIPE, test_side="auto")
    told = {}
    chosen, found, _ = choose_test_input(base, domain, data, recipe, told.__setitem__)
    assert (chosen.side, chosen.crop) == (side, crop)
    assert [one for one, _ in asked] == tried
    assert len(found) == len(asked)
    assert told == found


@pytest.mark.parametrize(("until", "tried"), [(math.inf, [24, 32, 40, 48, 40]), (0.0, [24, 24])])
def test_no_larger_side_is_begun_when_the_time_is_over(data, favourite, until, tried):
    base = made_base()
    asked = favourite(40, 1.0)
    recipe = pm.get_recipe(RECIPE, test_side="auto")
    domain = pm.new_domain(base, "bn-only", data.classes)
    choose_test_input(base, domain, data, recipe, until=until)
    assert [one for one, _ in asked] == tried


@pytest.mark.parametrize(("ahead", "behind", "clear"), [(3, 2, False), (9, 4, True), (1, 0, False), (2, 0, True)])
def test_a_larger_size_must_be_better_by_more_images_than_chance_may_give(data, ahead, behind, clear):
    domain = pm.new_domain(made_base(), "bn-only", data.classes)
    right = torch.tensor([True] * 20 + [True] * ahead + [False] * behind + [False] * 5)
    other = torch.tensor([True] * 20 + [False] * ahead + [True] * behind + [False] * 5)
    one, two = (Reached(100 * float(each.float().mean()), each) for each in (right, other))
    assert clearly_better(domain, one, two) is clear
    assert not clearly_better(domain, two, one)
    assert not clearly_better(domain, one, one)


def test_equal_results_leave_the_smallest_size(data, favourite):
    base = made_base()
    favourite(0, 0)
    domain = pm.new_domain(base, "bn-only", data.classes)
    assert choose_test_input(base, domain, data, pm.get_recipe(RECIPE, test_side="auto"))[0] == domain.input


def test_a_network_of_one_size_keeps_it(data):
    base = made_base(fixed=True)
    domain = pm.new_domain(base, "bn-only", data.classes)
    domain.input = base.input
    chosen, found, _ = choose_test_input(base, domain, data, pm.get_recipe(RECIPE, test_side="auto"))
    assert chosen.side == 24
    assert {text.partition(" ")[0] for text in found} == {"24"}
    with pytest.raises(TrainingError, match="does not take images of 3 × 40 × 40"):
        choose_test_input(base, domain, data, pm.get_recipe(RECIPE, test_side=40))


@pytest.mark.parametrize("test_side", [40, "auto"])
def test_learning_measures_and_stores_what_was_chosen(data, tmp_path, test_side):
    base = made_base()
    learned = pm.learn(base, data, "bn-only", pm.get_recipe(RECIPE, test_side=test_side))
    domain = learned.domain
    assert domain.input.side == 40 or test_side == "auto"
    assert learned.test_accuracy == measured_at(base, domain, data.test, domain.input).value
    if test_side == 40:
        assert domain.metrics["val_accuracy"] == measured_at(base, domain, data.val, domain.input).value
    if test_side == "auto":
        sides = domain.metrics["val_by_test_side"]
        assert domain.metrics["val_accuracy"] == sides[way_of(domain.input)]
    domain.save(tmp_path / "made.safetensors")
    assert pm.load_domain(tmp_path / "made.safetensors", base).input == domain.input
    model = pm.MultiDomainModel(base, library=tmp_path)
    assert model.predict(np.zeros((60, 60, 3), np.uint8), domain="made")[0].top


def test_without_it_nothing_changes(data):
    base = made_base()
    plain = pm.learn(base, data, "bn-only", RECIPE)
    assert plain.domain.input.side == 24
    assert "val_by_test_side" not in plain.domain.metrics
    assert "test_side" not in plain.domain.recipe


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"test_side": 0}, "test_side=0 must be from 1"),
        ({"test_side": "large"}, "test_side"),
    ],
)
def test_a_size_that_cannot_be_is_refused(data, fields, message):
    with pytest.raises(PolymaskError, match=message):
        pm.learn(made_base(), data, "bn-only", pm.get_recipe(RECIPE, **fields))


def test_without_val_the_size_is_that_of_training(data):
    last = {"test_side": "auto", "train_on_val": True, "selection": "last"}
    learned = pm.learn(made_base(), data, "bn-only", pm.get_recipe(RECIPE, **last))
    assert learned.domain.input.side == 24
    assert "val_by_test_side" not in learned.domain.metrics


@pytest.mark.parametrize("test_side", [40, "auto"])
def test_a_head_is_fitted_to_images_of_the_size_at_test(data, test_side, monkeypatch):
    """So says a head that is right only there: its logits are those of a regression on features of that size."""
    base = made_base()
    monkeypatch.setattr("polymask.train.sizing.clearly_better", lambda domain, one, other: True)
    recipe = pm.get_recipe(RECIPE, rate=0.0, head_rate=0.0, refit=0.01, test_side=test_side, precision=32)
    domain = pm.learn(base, data, "affine-full", recipe, progress=False).domain
    assert domain.input.side == (40 if test_side == 40 else 48)
    expected = pm.new_domain(base, "affine-full", data.classes)
    expected.input = domain.input
    batches = [loader_at(split, domain.input) for split in (data.train, data.val)]
    fit_head(base, expected, *batches, (0.01,))
    assert torch.allclose(domain.head.weight, expected.head.weight, atol=1e-4)


def test_several_domains_together_are_refused(data):
    lesson = pm.Lesson(data.classes, [(torch.zeros(2, 3, 24, 24), torch.tensor([0, 1]))])
    with pytest.raises(TrainingError, match="for one domain"):
        pm.fit_all(made_base(), {"one": lesson}, "bn-only", pm.get_recipe(RECIPE, test_side=32))


def test_the_command_says_what_it_chose(tmp_path, monkeypatch, capsys):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    for label, shade in (("dark", 40), ("light", 200)):
        (tmp_path / "images" / label).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (40, 40), (shade + i,) * 3).save(tmp_path / "images" / label / f"{i}.png")
    words = ["learn", "shades", "--data", "images", "--method", "classifier-only", "--epochs", "1", "--side", "32"]
    assert main([*words, "--test-side", "auto"]) == 0
    assert "fed at" in capsys.readouterr().out
