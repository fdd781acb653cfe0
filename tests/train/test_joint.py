"""Domains that are learned together: whose turn it is, and how long an epoch is."""

import pytest
import torch

import polymask as pm
from nets import block_base
from polymask.errors import InterruptedTraining, TrainingError
from polymask.train.fit import Listener, fit_joint
from polymask.train.recipe import Recipe
from polymask.train.state import CheckpointError
from sequences import Interrupt
from short_training import Fixed

RECIPE = Recipe(epochs=3, rate=1e-3, weight_rate=1e-3, head_rate=1e-2, drops=(), selection="last")


class Noted(Fixed):
    """Batches that say when they were taken: (pass, place)."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.taken: list[tuple[int, int]] = []

    def batches(self, epoch: int = 0, start: int = 0):
        for step, batch in enumerate(super().batches(epoch, start), start):
            self.taken.append((epoch, step))
            yield batch


class Rounds(Listener):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs: list[int] = []

    def begin(self, recipe, steps, epoch):
        self.announced = steps

    def step(self, epoch, step, loss, images, density):
        self.steps.append(epoch)

    def epoch(self, record, seconds):
        self.epochs.append(record.epoch)


def fitted(trains, method="series-adapter-joint", **arguments):
    base = block_base()
    torch.manual_seed(0)
    domains = [pm.new_domain(base, method, ["a", "b", "c"]) for _ in trains]
    domains[0].method.tie(domains)
    fit_joint(base, domains, trains, [None] * len(trains), RECIPE, **arguments)
    return domains


def test_an_epoch_is_one_pass_over_the_largest_domain_and_the_others_begin_again():
    trains, rounds = [Noted(5), Noted(2), Noted(3)], Rounds()
    fitted(trains, listener=rounds)
    assert rounds.announced == 5 * 3
    assert rounds.epochs == [0, 1, 2]
    assert rounds.steps == [0] * 15 + [1] * 15 + [2] * 15
    for train in trains:  # 15 rounds, every image of a pass before the next pass begins
        assert train.taken == [divmod(i, train.steps) for i in range(15)]


@pytest.mark.parametrize(
    ("method", "steps"),
    [("series-adapter-joint", 4), ("mtan", 11), ("series-adapter-joint", 24)],  # in a first pass, a second, epoch 1
)
def test_a_run_that_was_cut_while_domains_begin_again_ends_as_one_that_was_not(method, steps, tmp_path):
    def trains():
        return [Fixed(5), Fixed(2, 40), Fixed(3, 80)]

    whole = fitted(trains(), method)
    file = {"checkpoint": tmp_path / "c", "resume": True}
    with pytest.raises(InterruptedTraining):
        fitted(trains(), method, listener=Interrupt(steps), **file)
    for one, other in zip(whole, fitted(trains(), method, **file), strict=True):
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])


def test_a_checkpoint_of_epochs_of_another_length_is_not_gone_on_from(tmp_path):
    file = {"checkpoint": tmp_path / "c", "resume": True}
    with pytest.raises(InterruptedTraining):
        fitted([Fixed(5), Fixed(2)], listener=Interrupt(3), **file)
    with pytest.raises(CheckpointError, match=r"number of rounds 5 → 4"):
        fitted([Fixed(4), Fixed(2)], **file)


def test_a_domain_without_a_batch_is_refused():
    with pytest.raises(TrainingError, match="a domain has no batch to train on"):
        fitted([Fixed(2), Fixed(0)])


def test_norms_that_are_to_be_estimated_again_are():
    train = Fixed(3)
    base = block_base()
    torch.manual_seed(0)
    (domain,) = [pm.new_domain(base, "series-adapter-joint", ["a", "b", "c"], norm_reestimate=True)]
    fit_joint(base, [domain], [train], [None], RECIPE)
    after = {name: tensor.clone() for name, tensor in domain.norms.state_dict().items() if "running" in name}
    domain.reestimate_norms(base, (images for images, _ in train.batches(0)))
    again = domain.norms.state_dict()
    assert after
    assert all(torch.allclose(again[name], tensor, atol=1e-6) for name, tensor in after.items())
