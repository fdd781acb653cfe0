"""A method with options and fields of its recipe, from one line of text."""

import pytest

import polymask as pm
from polymask.train.recipe import get_recipe, method_by, read_method, read_value, write_value

QUICK = get_recipe("quick")


def test_options_go_to_the_method_and_other_names_to_the_recipe():
    row = read_method("lora-conv:rank=4:epochs=9:norms=stats")
    assert row.options == {"rank": 4, "norms": "stats"}
    assert row.recipe(QUICK).epochs == 9
    assert (row.method(QUICK).rank, row.method(QUICK).norms) == (4, "stats")


def test_a_rate_is_that_of_whole_weights_too_unless_they_have_their_own():
    assert read_method("finetune:rate=3e-4").recipe(QUICK).weight_rate == 3e-4
    both = read_method("finetune:rate=3e-4:weight_rate=1e-5").recipe(QUICK)
    assert (both.rate, both.weight_rate) == (3e-4, 1e-5)


def test_a_row_may_have_the_recipe_of_its_own_paper():
    row = read_method("series-adapter:recipe=residual-adapters:epochs=6:start=he")
    recipe = row.recipe(get_recipe("quick", selection="last"))
    assert (recipe.name, recipe.optimiser, recipe.epochs) == ("residual-adapters", "sgd", 6)
    assert recipe.selection == "last"  # how rows are measured is the same for all
    assert row.method(QUICK).start == "he"


def test_a_recipe_decides_norms_unless_the_options_do():
    assert method_by(QUICK, "affine-full").norms == "affine"
    assert method_by(QUICK, "affine-full", norms="own").norms == "own"


def test_a_distance_from_the_threshold_is_counted_in_steps_of_the_rate():
    near = read_method("affine-full:distance=1:rate=5e-4").method(QUICK)
    assert near.scores == pytest.approx((5e-4, 1e-3))
    far = read_method("piggyback:distance=10:rate=1e-3").method(QUICK)
    assert far.scores == pytest.approx((1.5e-2, 1.5e-2))  # ten steps above its threshold, 5e-3
    assert method_by(QUICK, "affine-full").scores == (1e-4, 2e-4)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ba2:colour=red", "neither ba2 nor a recipe has 'colour'"),
        ("ba2:budget", "not OPTION=VALUE"),
        ("affine-full:selection=best", "neither affine-full nor a recipe has 'selection'"),
        ("bo2:budget=1", "method 'bo2' is not known"),
        ("affine-full:distance=-1", "distance=-1"),
    ],
)
def test_what_makes_no_sense_is_named(text, named):
    with pytest.raises(pm.MethodError, match=named):
        read_method(text)


@pytest.mark.parametrize("value", [True, False, None, 3, 3e-4, 1e-5, "own", (1, 2.5)])
def test_values_are_read_as_they_are_written(value):
    assert read_value(write_value(value)) == value
