"""Heads that are fitted to all features at once, when training is over."""

import pytest
import torch

import polymask as pm
from brightness import made_base, made_data
from nets import tiny_base
from polymask.core.target import CLASSES
from polymask.errors import PolymaskError
from polymask.train.regression import Seen, fit_head_again

RECIPE = pm.get_recipe("quick", epochs=2, batch_size=8, side=24)


@pytest.fixture(scope="module")
def data():
    return made_data("dark", "light")


RECIPES = {
    "one way to learn nothing": {"rate": 0.0, "head_rate": 0.0},
    "learning": {"rate": 1e-3, "head_rate": 1e-2},
}


@pytest.mark.parametrize("fields", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("refit", [0.01, "auto"])
def test_a_head_that_is_fitted_again_is_never_worse_on_val(data, fields, refit):
    base = made_base()
    results = {}
    for chosen in (None, refit):
        learned = pm.learn(base, data, "affine-full", pm.get_recipe(RECIPE, **fields, refit=chosen), progress=False)
        loader = pm.make_loaders(data, base.input, RECIPE).val
        results[chosen] = pm.evaluate(base, learned.domain, loader)
        assert learned.domain.metrics["val_accuracy"] >= results[chosen] - 1e-6
    assert results[refit] >= results[None]
    assert results[refit] == 100  # brightness is all that there is to see


def test_nothing_but_the_head_is_fitted_again(data):
    base = made_base()
    plain, again = (
        pm.learn(
            base, data, "affine-full", pm.get_recipe(RECIPE, rate=1e-3, refit=refit), progress=False
        ).domain.stored()
        for refit in (None, "auto")
    )
    changed = {
        name for name in plain if isinstance(plain[name], torch.Tensor) and not torch.equal(plain[name], again[name])
    }
    assert {name for name in changed if not name.startswith("unknown/")} <= {"head/weight", "head/bias"}


def test_without_val_a_head_is_fitted_by_the_number_that_is_given(data):
    base = made_base()
    last = {"selection": "last", "train_on_val": True}
    learned = pm.learn(base, data, "bn-only", pm.get_recipe(RECIPE, **last, refit=0.01), progress=False)
    assert learned.test_accuracy == 100
    plain, auto = (
        pm.learn(base, data, "bn-only", pm.get_recipe(RECIPE, **last, refit=refit), progress=False).domain.head.weight
        for refit in (None, "auto")
    )
    assert torch.equal(plain, auto)  # there is nothing to choose on


def test_many_classes_and_images_get_as_many_steps_as_there_is_work_for(monkeypatch):
    from polymask.train import regression

    features, labels = torch.randn(50, 4), torch.arange(50) % 3
    seen = []
    real = torch.optim.LBFGS
    monkeypatch.setattr(torch.optim, "LBFGS", lambda *given, **how: seen.append(how["max_iter"]) or real(*given, **how))
    for work in (10**12, 50 * 4 * 3 * 7, 1):
        monkeypatch.setattr(regression, "WORK", work)
        weight, bias = (torch.zeros(shape, requires_grad=True) for shape in ((3, 4), (3,)))
        regression._minimise(features, labels, weight, bias, 0.1, CLASSES)
    assert seen == [100, 7, 1]


def test_domains_that_learn_together_have_their_heads_fitted_again(data):
    base = made_base()
    loaders = pm.make_loaders(data, base.input, RECIPE)
    lesson = pm.Lesson(data.classes, loaders.train, loaders.val, loaders.test)
    fitted = pm.fit_all(
        base, {"one": lesson, "two": lesson}, "mtan", pm.get_recipe(RECIPE, rate=0.0, head_rate=0.0, refit="auto")
    )
    assert [pm.evaluate(base, domain, loaders.val) for domain in fitted.domains.values()] == [100, 100]


def test_a_penalty_below_zero_is_refused():
    with pytest.raises(PolymaskError, match="refit=-1"):
        pm.get_recipe("quick", refit=-1)


@pytest.mark.parametrize("balance", ["weights", "sampler"])
def test_a_head_that_is_fitted_again_is_balanced_as_training_is(balance):
    base = tiny_base()
    draw = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.zeros(90), torch.ones(10)]).long()
    seen = Seen(torch.randn(100, base.feature_dim, generator=draw) + labels[:, None] * 0.3, labels)
    shares = []
    for fields in ({}, {"balance": balance}):
        domain, recipe = pm.new_domain(base, "classifier-only", ["a", "b"]), pm.get_recipe("quick", **fields)
        fit_head_again(domain, seen, None, 0.1, balanced=recipe.balance is not None)
        shares.append(float((domain.head(seen.features).argmax(1) == 1)[labels == 1].float().mean()))
    assert shares[1] > shares[0] + 0.3
