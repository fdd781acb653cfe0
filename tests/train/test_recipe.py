"""Recipes: the paper's two protocols, changes field by field, and refusals."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymask.core.input import InputSpec
from polymask.train.recipe import RECIPES, Recipe, RecipeError, get_recipe


def test_imagenet_to_sketch_is_the_papers_protocol():
    recipe = RECIPES["imagenet-to-sketch"]
    assert (recipe.rate, recipe.head_rate, recipe.head_momentum) == (1e-4, 1e-3, 0.9)
    assert (recipe.head_optimiser, recipe.batch_size, recipe.epochs) == ("sgd", 32, 30)
    assert recipe.crop_scale == (0.08, 1.0)
    assert [recipe.factor(epoch) for epoch in (0, 14.99, 15, 29.9)] == [1, 1, 0.1, 0.1]
    assert recipe.input(InputSpec()).side == 224


def test_decathlon_is_the_papers_protocol():
    recipe = RECIPES["decathlon"]
    assert (recipe.epochs, recipe.drops, recipe.batch_size) == (60, (45,), 32)
    spec = recipe.input(InputSpec())
    assert spec.shape == (3, 64, 64)
    assert round(spec.side / spec.crop) == 72


@given(st.integers(1, 50), st.floats(0, 3))
def test_a_cosine_falls_from_one_to_zero_after_its_warm_up(epochs, warmup):
    recipe = Recipe(epochs=epochs, schedule="cosine", warmup=min(warmup, epochs / 2))
    points = [recipe.factor(recipe.warmup + i * (epochs - recipe.warmup) / 20) for i in range(21)]
    assert points[0] == pytest.approx(1)
    assert points[-1] == pytest.approx(0, abs=1e-9)
    assert all(a >= b for a, b in pairwise(points))
    assert 0 <= recipe.factor(recipe.warmup / 2) <= 1


def test_a_warm_up_takes_at_most_half_of_the_training():
    recipe = Recipe(epochs=2, schedule="cosine", warmup=5.0)
    assert [recipe.factor(epoch) for epoch in (0, 0.5, 1, 2)] == pytest.approx([0, 0.5, 1, 0])


def test_fields_are_changed_by_name_and_by_file(tmp_path):
    assert get_recipe("quick", epochs=2).epochs == 2
    path = tmp_path / "mine.toml"
    path.write_text('recipe = "decathlon"\nepochs = 3\ndrops = [1, 2]\n')
    recipe = get_recipe(path, rate=0.5)
    assert (recipe.name, recipe.epochs, recipe.drops, recipe.rate) == ("mine", 3, (1, 2), 0.5)
    assert recipe.side == 64


@pytest.mark.parametrize(
    ("images", "epochs"),
    [(None, 6), (10_000, 6), (320, 10), (321, 10), (40, 30)],
    ids=["unknown", "many", "few", "a last batch that is not whole", "very few"],
)
def test_few_images_are_gone_through_more_often(images, epochs):
    recipe = get_recipe("quick", least_steps=100).for_images(images)
    assert (recipe.epochs, recipe.least_steps) == (epochs, None)


def test_epochs_that_are_given_stay_as_many(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('recipe = "standard"\nepochs = 3\n')
    given = [get_recipe("standard", epochs=3), get_recipe("standard").changed({"epochs": 3}), get_recipe(path)]
    assert [recipe.for_images(10).epochs for recipe in given] == [3, 3, 3]
    assert get_recipe("standard", epochs=3, least_steps=10).for_images(1).epochs == 10
    assert get_recipe("standard").for_images(10).epochs > 3


def test_a_recipe_round_trips_through_json():
    for recipe in RECIPES.values():
        assert Recipe(**recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("quik", {}, "recipe 'quik' is not known; did you mean quick"),
        ("quick", {"epoch": 3}, "no field 'epoch'; did you mean epochs"),
        ("quick", {"epochs": 0}, "epochs=0 must be at least 1"),
        ("quick", {"least_steps": 0}, "least_steps=0 must be at least 1"),
        ("quick", {"rate": -1.0}, "rate=-1.0 cannot be negative"),
        ("quick", {"schedule": "linear"}, "schedule='linear' is not one of"),
        ("quick", {"crop_scale": (0.5, 2.0)}, "crop_scale"),
        ("quick", {"label_smoothing": 1.0}, "label_smoothing"),
        ("quick", {"train_on_val": True}, "leaves no val to select on"),
        ("none.toml", {}, "none.toml cannot be read"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(recipe, changes, message):
    with pytest.raises(RecipeError, match=message):
        get_recipe(recipe, **changes)


def test_a_file_that_is_not_toml_is_refused(tmp_path):
    (tmp_path / "x.toml").write_text("epochs 3")
    with pytest.raises(RecipeError, match="is not TOML"):
        get_recipe(tmp_path / "x.toml")


@pytest.mark.parametrize("epochs", [2, 3, 5, 6, 30])
@pytest.mark.parametrize("shares", [(2 / 3, 1 / 3), (0.5, 0.5), (0.25, 0.25, 0.5)])
def test_stages_share_out_one_budget_of_epochs(epochs, shares):
    recipe = get_recipe("quick", epochs=max(epochs, len(shares) + 1))
    before, total = 0.0, 0
    for share in shares:
        total += recipe.stage(before, share).epochs
        before += share
    assert total == recipe.epochs


def test_a_later_stage_has_its_factor_of_all_rates_its_drops_and_no_warm_up():
    recipe = get_recipe("quick", epochs=30, drops=(15,), warmup=3.0, scalar_rate=1e-2)
    later = recipe.stage(2 / 3, 1 / 3, 0.1)
    assert (later.epochs, later.drops, later.warmup) == (10, (5,), 0.0)
    for name in ("rate", "weight_rate", "scalar_rate", "head_rate"):
        assert getattr(later, name) == pytest.approx(0.1 * getattr(recipe, name))
    assert recipe.stage(0.0, 1.0) is recipe


def test_residual_adapters_decay_as_their_paper_has_it():
    recipe = get_recipe("residual-adapters")
    decays = (recipe.transform_decay, recipe.weight_decay, recipe.head_decay)
    assert decays == (5e-4, 1e-4, 1e-4)
    assert get_recipe("imagenet-to-sketch").transform_decay == 0
