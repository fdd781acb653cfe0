"""Masks that go on from a one-bit domain: where they start, and what they keep."""

import dataclasses

import pytest
import torch

from nets import batch, tiny_base, tiny_net
from polymask.conversion.convert import one_bit_domain
from polymask.conversion.finetuned import Finetuned
from polymask.conversion.refine import STEPS_TO_FLIP, started_at, train_on
from polymask.train.learn import Loaders
from polymask.train.predict import evaluate
from polymask.train.recipe import Recipe

RECIPE = Recipe(epochs=2, rate=1e-3, head_rate=1e-3, norms="affine", norm_momentum=0.2)


class Same:
    """The same two batches in every epoch."""

    def __len__(self):
        return 2

    def batches(self, epoch=0, start=0):
        return iter([batch(16, seed=0)] * (2 - start))


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def tuned(base):
    """A network with every parameter moved but those of one site."""
    state = tiny_net().state_dict()
    torch.manual_seed(1)
    moved = [n for n, t in state.items() if t.is_floating_point() and n != "grouped.weight"]
    state |= {n: state[n] + 0.02 * torch.rand_like(state[n]) - 0.01 for n in moved}
    state["stem.weight"][0] = base.tensor("stem.weight")[0]  # a change of nothing has a bit too
    state |= {"fc.weight": torch.randn(3, 12), "fc.bias": torch.randn(3)}
    return Finetuned.read(base, state)


@pytest.fixture(params=["bitdelta", "bitdelta-row"])
def one_bit(base, tuned, request):
    return one_bit_domain(base, tuned, ["a", "b", "c"], request.param)


def test_masks_start_where_the_one_bit_domain_stands_to_the_bit(base, tuned, one_bit):
    domain = started_at(base, one_bit, tuned, RECIPE).eval()
    ours, theirs = domain.weights(base), one_bit.weights(base)
    biases = {site.bias for site in base.sites.values() if site.has_bias}
    assert theirs.keys() - ours.keys() == biases  # an affine mask has none
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]) or name.endswith("num_batches_tracked"), name
    assert torch.equal(domain.head.weight, tuned.weight)
    assert all(p.requires_grad for p in domain.parameters())


def test_the_norms_are_the_domains_own_whatever_the_recipe_says(base, tuned, one_bit):
    method = started_at(base, one_bit, tuned, RECIPE).method
    assert (method.name, method.norms, method.norm_momentum) == ("affine-full", "own", 0.2)


def test_a_weight_of_mean_change_is_many_steps_from_flipping_and_none_is_less_than_one(base, tuned, one_bit):
    for name, transform in started_at(base, one_bit, tuned, RECIPE).named_transforms():
        size = tuned.delta(base, name).abs()
        if not size.any():
            assert name == "grouped.weight"
            continue
        steps = transform.scores.detach().abs() / RECIPE.rate  # of Adam, to the threshold
        assert steps.min() >= 1 - 1e-4
        assert steps[size >= size.mean()].min() >= STEPS_TO_FLIP - 1e-2
        assert steps[size < size.mean() / STEPS_TO_FLIP].sum() <= 1.001 * size.numel()


def test_training_that_only_harms_is_undone(base, tuned, one_bit):
    loaders = Loaders(Same(), Same(), None)
    start = started_at(base, one_bit, tuned, RECIPE)
    start.head.load_state_dict(fitted_head(base, start))
    expected = start.frozen()
    before = evaluate(base, start, Same())
    assert before > 60
    harmful = dataclasses.replace(RECIPE, epochs=1, rate=10.0, head_rate=10.0)
    kept, accuracy = train_on(base, start, loaders, harmful, seed=0)
    assert accuracy == before == evaluate(base, kept, Same())
    with torch.no_grad():
        images = batch()[0]
        assert torch.equal(kept(base, images), expected(base, images))


def test_training_that_helps_is_kept(base, tuned, one_bit):
    loaders = Loaders(Same(), Same(), None)
    start = started_at(base, one_bit, tuned, RECIPE)
    before = evaluate(base, start, Same())
    recipe = dataclasses.replace(RECIPE, epochs=8, head_rate=0.5)
    kept, accuracy = train_on(base, start, loaders, recipe, seed=0)
    assert accuracy == evaluate(base, kept, Same()) > before


def fitted_head(base, domain):
    """The least-squares head of the domain's features on the batch: better than chance."""
    images, labels = batch(16, seed=0)
    with torch.no_grad():
        features = domain.eval().features(base, images)
    ones = torch.cat([features, torch.ones(len(features), 1)], 1)
    targets = torch.nn.functional.one_hot(labels, 3).float()
    solved = torch.linalg.lstsq(ones, targets, driver="gelsd").solution.T
    return {"weight": solved[:, :-1].contiguous(), "bias": solved[:, -1].contiguous()}
