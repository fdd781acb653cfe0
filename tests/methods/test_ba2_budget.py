"""BA²'s budget: how training asks for it, and that what is stored has it."""

import os
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import polymask as pm
from nets import SPEC, batch, block_base, logits, tiny_base, trained
from polymask.core.survey import Site
from polymask.errors import InterruptedTraining
from polymask.methods.ba2 import Ba2, Switches, limits
from polymask.train.fit import Listener, fit
from polymask.train.learner import mask_density
from polymask.train.predict import evaluate
from polymask.train.recipe import Recipe

BUDGETS = {"ba2": 1.0, "ba2-75": 0.75, "ba2-50": 0.5, "ba2-25": 0.25}
RECIPE = Recipe(epochs=10, batch_size=16, rate=1e-3, head_rate=1e-2, drops=())


class Patterns:
    """Batches of one colour pattern a class, with fresh noise."""

    def __init__(self, steps: int = 8, offset: int = 0) -> None:
        self.steps, self.offset = steps, offset

    def __len__(self) -> int:
        return self.steps

    def batches(self, epoch: int = 0, start: int = 0):
        for step in range(start, self.steps):
            images, labels = batch(16)
            noise = torch.Generator().manual_seed(1000 * (epoch + self.offset) + step)
            yield images + torch.randn(images.shape, generator=noise), labels


TRAIN, VAL = Patterns(), Patterns(2, offset=99)


def linear_switches(layer: nn.Linear, budget: float) -> Switches:
    site = Site("weight", tuple(layer.weight.shape), "linear", 1, "bias", True, None, False, torch.float32)
    return Ba2(budget=budget).transform(site)


def set_scores(transform: Switches, scores) -> None:
    with torch.no_grad():
        transform.scores.copy_(torch.as_tensor(scores))


def all_switches(domain: pm.Domain) -> torch.Tensor:
    return torch.cat([t.mask() for _, t in domain.named_transforms()])


@pytest.mark.parametrize("method", BUDGETS)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_scores_are_the_stored_form_is_within_the_budget(method, seed):
    base = block_base()
    domain = pm.new_domain(base, method, ["a", "b"])
    torch.manual_seed(seed)
    for _, transform in domain.named_transforms():
        set_scores(transform, torch.randn(transform.channels) + 1)
    for stored in (domain, domain.frozen()):
        masks = [t.mask() for _, t in stored.named_transforms()]
        for mask in masks:  # before an objective has compared sites, each has its own share
            assert 1 <= mask.sum() <= max(1, BUDGETS[method] * len(mask))
    assert torch.equal(all_switches(domain), all_switches(domain.frozen()))
    domain.eval()
    assert torch.equal(logits(base, domain), logits(base, domain.frozen()))


def test_a_site_keeps_its_best_scores_and_the_earlier_of_equal_ones():
    transform = linear_switches(nn.Linear(8, 2), 0.5)
    set_scores(transform, [1, 3, 1, 1, 2, 1, -1, 1])
    assert transform.mask().tolist() == [1, 1, 1, 0, 1, 0, 0, 0]
    set_scores(transform, [-3, -2, -1, -1, -4, -3, -3, -3])
    assert transform.mask().tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


def test_training_uses_what_the_scores_say_and_the_stored_form_the_limit():
    layer = nn.Linear(8, 2)
    transform = linear_switches(layer, 0.25)
    set_scores(transform, [1, -1, 2, 3, 0, 1, 1, 1])
    on = (transform.weight(layer.weight) != 0).all(0)
    assert on.tolist() == [1, 0, 1, 1, 1, 1, 1, 1]
    transform.eval()
    assert (transform.weight(layer.weight) != 0).all(0).tolist() == [0, 0, 1, 1, 0, 0, 0, 0]


def test_norm_statistics_are_estimated_again_for_the_switches_that_are_stored():
    base = block_base()
    domain = trained(base, "ba2-50")
    stored = domain.frozen()
    for one in (domain, stored):
        one.reestimate_norms(base, [batch()[0]])
    for (_, own), (_, expected) in zip(domain.named_norms(), stored.named_norms(), strict=True):
        assert torch.equal(own.running_mean, expected.running_mean)
        assert torch.equal(own.running_var, expected.running_var)


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.integers(-5, 5), min_size=1, max_size=12), min_size=1, max_size=6),
    st.floats(0.01, 1),
)
def test_limits_share_out_the_budget_among_the_best_of_all_scores(sites, budget):
    given_limits = limits([torch.tensor(s).double() for s in sites], budget).tolist()
    total = max(len(sites), int(budget * sum(map(len, sites))))
    assert sum(given_limits) == total
    assert all(limit >= 1 for limit in given_limits)
    best = [sorted(s, reverse=True) for s in sites]
    taken = [s for own, n in zip(best, given_limits, strict=True) for s in own[1:n]]
    left = [s for own, n in zip(best, given_limits, strict=True) for s in own[n:]]
    assert not taken or not left or min(taken) >= max(left)


def test_the_objective_is_the_lagrange_term_and_its_multiplier_rises_with_the_excess():
    base = block_base()
    domain = pm.new_domain(base, "ba2-50", None, ascent=0.1).train()
    objective = domain.method.objective(base, domain, lambda: iter(()))
    transforms = [t for _, t in domain.named_transforms()]
    total = sum(t.channels for t in transforms)
    nothing = torch.empty(0)
    assert not list(objective.parameters())

    term = objective(nothing, nothing)  # all are on
    torch.testing.assert_close(objective.multiplier, torch.tensor(0.1 * 0.5))
    torch.testing.assert_close(term, torch.tensor(0.05 * total * 0.5))
    term.backward()
    for transform in transforms:
        torch.testing.assert_close(transform.scores.grad, torch.full_like(transform.scores, 0.05))

    objective(nothing, nothing)
    torch.testing.assert_close(objective.multiplier, torch.tensor(0.1))
    for transform in transforms:
        set_scores(transform, -torch.ones(transform.channels))  # one of each stays
    mean = len(transforms) / total
    term = objective(nothing, nothing)
    assert term == 0
    torch.testing.assert_close(objective.multiplier, torch.tensor(0.1 - 0.1 * (0.5 - mean)))
    for _ in range(10):
        objective(nothing, nothing)
    assert objective.multiplier == 0


def test_a_site_whose_scores_are_better_may_keep_more_than_its_share():
    base = block_base()
    domain = pm.new_domain(base, "ba2-25", None).train()
    transforms = dict(domain.named_transforms())
    set_scores(transforms["stem.weight"], [3, 3, 3])
    assert transforms["stem.weight"].mask().sum() == 1
    domain.method.objective(base, domain, lambda: iter(()))(torch.empty(0), torch.empty(0))
    assert transforms["stem.weight"].mask().all()
    assert all_switches(domain).sum() == int(0.25 * len(all_switches(domain)))


def test_without_a_budget_there_is_no_objective():
    base = tiny_base()
    domain = pm.new_domain(base, "ba2", None)
    assert domain.method.objective(base, domain, lambda: iter(())) is None


class Watch(Listener):
    """Remembers, at the end of every epoch, how many switches are on: stored, and in training."""

    def __init__(self, domain: pm.Domain) -> None:
        self.domain, self.stored, self.training = domain, [], []

    def epoch(self, record, seconds):
        transforms = [t for _, t in self.domain.named_transforms()]
        self.stored.append(mask_density(self.domain))
        self.training.append(torch.cat([t.switches() for t in transforms]).mean().item())


@pytest.mark.parametrize("method", ["ba2-75", "ba2-50", "ba2-25"])
def test_training_learns_and_meets_the_budget(method):
    base = block_base()
    torch.manual_seed(0)
    domain = pm.new_domain(base, method, ["a", "b", "c"], ascent=1e-3)
    watch = Watch(domain)
    history = fit(base, domain, TRAIN, VAL, RECIPE, listener=watch)
    budget = BUDGETS[method]
    assert max(watch.stored) <= budget
    assert watch.training[0] > budget  # the limits had something to do at first
    assert watch.training[-1] <= budget + 0.03  # then the term has done it
    assert all_switches(domain).float().mean() <= budget
    assert evaluate(base, domain, VAL) == max(r.val_accuracy for r in history) > 60
    base.verify()


class StopAt(Listener):
    def step(self, epoch, step, loss, images, density):
        if (epoch, step) == (1, 3):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_stopped_run_resumes_to_the_bit(tmp_path):
    base = block_base()
    recipe = Recipe(epochs=3, rate=2e-3, head_rate=1e-2, drops=())

    def fresh():
        torch.manual_seed(0)
        return pm.new_domain(base, "ba2-50", ["a", "b", "c"], ascent=1e-3)

    whole, stopped, resumed = fresh(), fresh(), fresh()
    expected = fit(base, whole, TRAIN, VAL, recipe)
    checkpoint = tmp_path / "c.safetensors"
    with pytest.raises(InterruptedTraining):
        fit(base, stopped, TRAIN, VAL, recipe, checkpoint=checkpoint, listener=StopAt())
    history = fit(base, resumed, TRAIN, VAL, recipe, checkpoint=checkpoint, resume=True)
    assert history == expected
    assert torch.equal(all_switches(whole), all_switches(resumed))
    assert torch.equal(logits(base, whole), logits(base, resumed))


def test_autocast_and_a_network_without_norms_are_trained_too():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    base = pm.load_base(net, input=SPEC)
    torch.manual_seed(0)
    domain = pm.new_domain(base, "ba2-75", ["a", "b", "c"])
    recipe = Recipe(epochs=2, rate=1e-3, head_rate=0.1, drops=(), autocast=True)
    history = fit(base, domain, TRAIN, VAL, recipe)
    assert history[-1].loss < history[0].loss
    assert all_switches(domain).sum() <= 2
