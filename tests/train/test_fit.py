"""Training: it learns, resumes to the bit, stops when asked, and explains what goes wrong."""

import dataclasses
import signal

import pytest
import torch
from torch import nn

import polymask as pm
from nets import SPEC, block_base, logits, tiny_base, tiny_net
from polymask.errors import InterruptedTraining, TrainingError
from polymask.train.descent import descend, learned_by, make_optimisers, set_rates
from polymask.train.fit import Listener, fit
from polymask.train.learn import Learned
from polymask.train.learner import DomainLearner, EpochRecord, mask_density, placed
from polymask.train.predict import evaluate
from polymask.train.state import CheckpointError, load_checkpoint, save_checkpoint
from short_training import RECIPE, TRAIN, VAL, Fixed, StopAt, fresh, same


@pytest.mark.parametrize("method", ["affine-full", "finetune", "classifier-only"])
def test_a_domain_learns_and_ends_in_its_stored_form(method):
    base = tiny_base()
    domain = fresh(base, method)
    history = fit(base, domain, TRAIN, VAL, dataclasses.replace(RECIPE, epochs=15, drops=()))
    assert [record.epoch for record in history] == list(range(15))
    assert history[-1].loss < history[0].loss
    assert evaluate(base, domain, VAL) == max(r.val_accuracy for r in history)
    assert not any(p.requires_grad for p in domain.parameters())
    assert not domain.training
    base.verify()


def test_the_head_goes_on_learning_after_the_first_validation():
    base = tiny_base()
    domain, heads = fresh(base), []

    class Watch(Listener):
        def epoch(self, record, seconds):
            heads.append(domain.head.weight.detach().clone())

    fit(base, domain, TRAIN, VAL, RECIPE, listener=Watch())
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])


def test_equal_seeds_give_equal_domains_and_others_do_not():
    base = tiny_base()
    domains = []
    for seed in (0, 0, 1):
        domain = fresh(base)
        fit(base, domain, TRAIN, VAL, RECIPE, seed=seed)
        domains.append(domain)
    assert same(domains[0], domains[1])
    assert not same(domains[0], domains[2])  # dropout draws other numbers


@pytest.mark.parametrize(
    ("place", "number", "head"),
    [
        ((0, 1), signal.SIGINT, "sgd"),
        ((0, 4), signal.SIGTERM, "adam"),
        ((1, 2), signal.SIGTERM, "sgd"),
        ((2, 3), signal.SIGINT, "adam"),
    ],
)
def test_a_stopped_run_resumes_to_the_bit(tmp_path, place, number, head):
    handler = signal.getsignal(number)  # whatever started the tests may ignore Ctrl-C
    base = tiny_base()
    recipe = dataclasses.replace(RECIPE, head_optimiser=head)
    whole = fresh(base)
    expected = fit(base, whole, TRAIN, VAL, recipe)

    checkpoint = tmp_path / "c.safetensors"
    with pytest.raises(InterruptedTraining, match="training was asked to stop and saved"):
        fit(base, fresh(base), TRAIN, VAL, recipe, checkpoint=checkpoint,
            listener=StopAt(*place, number))  # fmt: skip
    torch.manual_seed(1234)
    resumed = fresh(base)
    history = fit(base, resumed, TRAIN, VAL, recipe, checkpoint=checkpoint, resume=True)
    assert history == expected
    assert same(whole, resumed)
    assert signal.getsignal(number) is handler


def test_a_finished_run_resumes_to_itself(tmp_path):
    base = tiny_base()
    checkpoint = tmp_path / "c.safetensors"
    first, second = fresh(base), fresh(base)
    fit(base, first, TRAIN, VAL, RECIPE, checkpoint=checkpoint)
    fit(base, second, TRAIN, VAL, RECIPE, checkpoint=checkpoint, resume=True)
    assert same(first, second)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"recipe": dataclasses.replace(RECIPE, rate=2e-3, epochs=7)}, "epochs 3 → 7, rate .* → 0.002"),
        ({"seed": 3}, "seed 0 → 3"),
        ({"method": "affine-simple"}, "method affine-full → affine-simple"),
        ({"recipe": dataclasses.replace(RECIPE, balance="weights")}, "balance None → weights"),
        ({"recipe": dataclasses.replace(RECIPE, refit=0.1, patience=1)}, "refit None → 0.1, patience None → 1"),
        ({"recipe": dataclasses.replace(RECIPE, head_start="centred")}, "head_start None → centred"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, what):
    base = tiny_base()
    checkpoint = tmp_path / "c.safetensors"
    fit(base, fresh(base), TRAIN, VAL, RECIPE, checkpoint=checkpoint)
    domain = fresh(base, change.get("method", "affine-full"))
    with pytest.raises(CheckpointError, match=f"is of a run with other settings: {what}"):
        fit(base, domain, TRAIN, VAL, change.get("recipe", RECIPE), seed=change.get("seed", 0),
            checkpoint=checkpoint, resume=True)  # fmt: skip


def test_a_damaged_checkpoint_is_named(tmp_path):
    path = tmp_path / "c.safetensors"
    path.write_bytes(b"nonsense")
    base = tiny_base()
    with pytest.raises(CheckpointError, match=r"c\.safetensors is not an intact checkpoint"):
        fit(base, fresh(base), TRAIN, VAL, RECIPE, checkpoint=path, resume=True)


def test_a_checkpoint_gives_back_any_tree(tmp_path):
    tree = {
        "a": [1, 2.5, "x", None, True, {"deep": torch.arange(3)}],
        "b": {3: torch.ones(2, 2, dtype=torch.bfloat16), "empty": {}},
        "tensor": {"tensor": "a word"},
    }
    save_checkpoint(tmp_path / "c", tree)
    again = load_checkpoint(tmp_path / "c")
    assert again["a"][:5] == tree["a"][:5]
    assert torch.equal(again["a"][5]["deep"], torch.arange(3))
    assert torch.equal(again["b"][3], tree["b"][3])
    assert again["b"]["empty"] == {}
    assert again["tensor"] == {"tensor": "a word"}


def test_a_loss_that_is_not_finite_stops_with_an_explanation():
    class Broken(Fixed):
        def batches(self, epoch=0, start=0):
            for images, labels in super().batches(epoch, start):
                yield images * float("inf"), labels

    base = tiny_base()
    with pytest.raises(TrainingError, match=r"the loss is nan in epoch 1, step 1; the rates are"):
        fit(base, fresh(base), Broken(), VAL, RECIPE)


def test_the_best_epoch_on_val_is_kept():
    base = tiny_base()
    kept = []

    class Watch(Listener):
        def epoch(self, record, seconds):
            kept.append((record.val_accuracy, logits(base, domain.eval())))
            domain.train()

    domain = fresh(base)
    fit(base, domain, TRAIN, VAL, dataclasses.replace(RECIPE, epochs=6), listener=Watch())
    best = max(accuracy for accuracy, _ in kept)
    first = next(output for accuracy, output in kept if accuracy == best)
    assert torch.equal(logits(base, domain), first)


def test_the_last_epoch_is_kept_where_the_recipe_says_so():
    base = tiny_base()
    last = []

    class Watch(Listener):
        def epoch(self, record, seconds):
            last[:] = [logits(base, domain.eval())]
            domain.train()

    domain = fresh(base)
    fit(base, domain, TRAIN, None, dataclasses.replace(RECIPE, selection="last"), listener=Watch())
    assert torch.equal(logits(base, domain), last[0])


def test_selection_on_val_needs_val():
    base = tiny_base()
    with pytest.raises(TrainingError, match="selection='best' needs val"):
        fit(base, fresh(base), TRAIN, None, RECIPE)


def test_statistics_are_estimated_again_at_the_end_where_the_method_says_so():
    base = tiny_base()
    domains = []
    for again in (False, True):
        domain = fresh(base, norm_reestimate=again)
        fit(base, domain, TRAIN, VAL, RECIPE)
        domains.append(domain)
    plain, averaged = (dict(d.named_norms())["stem_bn"] for d in domains)
    assert torch.equal(plain.weight, averaged.weight)
    assert not torch.equal(plain.running_mean, averaged.running_mean)


def test_rates_follow_the_recipe():
    seen = []

    class Watch(Listener):
        def step(self, epoch, step, loss, images, density):
            seen.append((epoch, optimisers["body"].param_groups[0]["lr"]))

    base = tiny_base()
    domain = fresh(base)
    import polymask.train.learner as learning

    made = learning.make_optimisers
    optimisers = {}
    learning.make_optimisers = lambda groups, r: optimisers.update(made(groups, r)) or optimisers
    try:
        fit(base, domain, TRAIN, VAL, RECIPE, listener=Watch())
    finally:
        learning.make_optimisers = made
    by_epoch = [{rate for epoch, rate in seen if epoch == e} for e in range(3)]
    assert by_epoch == [{1e-3}, {1e-3}, {1e-3 * 0.1}]


def test_a_stored_domain_has_nothing_to_learn():
    base = tiny_base()
    with pytest.raises(TrainingError, match="nothing to learn"):
        make_optimisers(fresh(base).frozen().param_groups(), RECIPE)


def test_mask_density_counts_all_masks():
    base = tiny_base()
    assert mask_density(fresh(base)) == 1.0
    assert mask_density(fresh(base, scores=(-2.0, -1.0))) == 0.0
    assert mask_density(fresh(base, "finetune")) is None


def test_crops_are_averaged():
    from polymask.train.predict import logits as run

    net = nn.Sequential(tiny_net().eval())
    images = torch.randn(2, 5, *SPEC.shape)
    expected = torch.stack([net(images[:, i]) for i in range(5)]).mean(0)
    torch.testing.assert_close(run(net, images), expected)


def test_images_are_not_laid_out_by_channels_where_that_would_break_a_gradient():
    images, labels = next(TRAIN.batches())
    narrow, _ = placed(images, labels, block_base(), RECIPE)  # a strided 1x1 of four channels
    wide, _ = placed(images, labels, tiny_base(), RECIPE)
    assert narrow.is_contiguous()
    assert wide.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("loss", "accuracy", "expected"),
    [(1.386, 25.0, True), (1.2, 25.0, False), (1.386, 60.0, False)],
)
def test_a_training_that_only_guesses_says_so(loss, accuracy, expected):
    domain = pm.new_domain(tiny_base(), "affine-full", ["a", "b", "c", "d"])
    learned = Learned(domain, [EpochRecord(0, loss, accuracy, None)], None)
    assert learned.at_chance is expected


DECAYS = {"transform_decay": 0.1, "weight_decay": 0.2, "head_decay": 0.3}


def decay_of(domain, recipe):
    """The decay of every parameter that a domain learns, by its name."""
    made = make_optimisers(learned_by([domain], [None]), recipe)
    groups = [group for optimiser in made.values() for group in optimiser.param_groups]
    found = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    return {name: found[id(p)] for name, p in domain.named_parameters()}


@pytest.mark.parametrize(
    ("method", "part", "decay"),
    [
        ("affine-full", "scores", 0.0),
        ("affine-full", "k2", 0.1),
        ("ba2", "scores", 0.0),
        ("parallel-adapter", "adapter", 0.1),
        ("lora-conv", "A", 0.1),
        ("finetune", "delta", 0.2),
        ("bitdelta", "delta", 0.2),
        ("finetune", "norms", 0.0),
        ("finetune", "head", 0.3),
    ],
)
def test_decay_has_a_number_for_each_group_and_reaches_neither_scores_nor_norms(method, part, decay):
    recipe = dataclasses.replace(RECIPE, **DECAYS)
    named = decay_of(fresh(tiny_base(), method), recipe).items()
    found = {value for name, value in named if name.startswith(part) or name.endswith(f".{part}")}
    assert found == {decay}


def test_decay_of_whole_weights_is_of_the_weights_and_not_of_their_change():
    base = tiny_base()
    domain = fresh(base, "finetune")
    recipe = dataclasses.replace(RECIPE, optimiser="sgd", weight_rate=0.1, momentum=0.0, weight_decay=0.5)
    learner = DomainLearner(base, domain, recipe)
    for _ in range(3):
        nothing = 0 * sum(p.sum() for p in domain.parameters())
        descend(nothing, learner.optimisers.values(), learner.pulls)
    for name, tensor in domain.weights(base).items():
        if name in base.sites:
            torch.testing.assert_close(tensor, 0.95**3 * base.tensor(name))
    base.verify()


def test_scalars_may_have_a_rate_of_their_own():
    domain = fresh(tiny_base())
    recipe = dataclasses.replace(RECIPE, scalar_rate=0.5)
    optimisers = make_optimisers(learned_by([domain], [None]), recipe)
    (scalars,) = optimisers["scalars"].param_groups
    ks = {id(p) for name, p in domain.named_parameters() if name.rpartition(".")[2][0] == "k"}
    assert {id(p) for p in scalars["params"]} == ks
    set_rates(optimisers, recipe, 0.0)
    assert (scalars["lr"], optimisers["body"].param_groups[0]["lr"]) == (0.5, RECIPE.rate)
    assert "scalars" not in make_optimisers(learned_by([domain], [None]), RECIPE)
