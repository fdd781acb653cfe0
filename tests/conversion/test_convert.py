"""Converting what somebody fine-tuned: the pack says what the checkpoint says, nearly."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymask as pm
from nets import SPEC, batch, tiny_base, tiny_net
from polymask.conversion.convert import convert, name_outputs, one_bit_domain, recipe_at
from polymask.conversion.finetuned import ConvertError, Finetuned
from polymask.data.images import DomainData
from polymask.data.split import ArraySplit
from polymask.methods.bitdelta import nearest
from polymask.train.fit import Listener
from polymask.train.learn import make_loaders
from polymask.train.predict import evaluate
from polymask.train.recipe import Recipe, split_seed

NAMES = ("ash", "birch", "cedar")
RECIPE = Recipe(name="small", epochs=4, rate=1e-3, head_rate=1e-3, crop_scale=(0.8, 1.0))


def images_of(count, seed):
    """Noisy patches of three colours that overlap."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % len(NAMES)
    colours = 128 + 35 * np.eye(3)[labels][:, None, None, :]
    pixels = colours + rng.normal(0, 25, (count, 1, 1, 3)) + rng.normal(0, 20, (count, 18, 18, 3))
    return ArraySplit(f"trees {seed}", pixels.clip(0, 255).astype(np.uint8), labels)


@pytest.fixture(scope="module")
def data():
    return DomainData("trees", NAMES, images_of(96, 1), images_of(60, 2), images_of(60, 3))


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def loaders(base, data):
    return make_loaders(data, base.input, recipe_at(base, RECIPE, None))


@pytest.fixture(scope="module")
def tuned_net(loaders):
    """The base's network, fine-tuned as anybody would."""
    net = tiny_net()
    torch.manual_seed(1)
    net.fc = nn.Linear(12, len(NAMES))
    optimiser = torch.optim.SGD(net.parameters(), 0.02, momentum=0.9)
    net.train()
    for epoch in range(12):
        for images, labels in loaders.train.batches(epoch):
            loss = F.cross_entropy(net(images), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return net.eval()


@pytest.fixture(scope="module")
def state(tuned_net):
    return {name: tensor.detach().clone() for name, tensor in tuned_net.state_dict().items()}


@pytest.fixture(scope="module")
def refined(base, state, data, loaders):
    return convert(base, state, data=data, recipe=RECIPE, loaders=loaders, steps=60)


def same_stored(a, b):
    ours, theirs = a.stored(), b.stored()
    assert ours.keys() == theirs.keys()
    return all(torch.equal(getattr(t, "words", t), getattr(theirs[n], "words", theirs[n])) for n, t in ours.items())


def test_the_masks_are_the_signs_of_the_change_and_all_else_is_copied(base, state):
    converted = convert(base, state)
    domain = converted.domain
    weights = domain.weights(base)
    for name, transform in domain.named_transforms():
        delta = state[name] - base.tensor(name)
        assert torch.equal(transform.mask(), delta > 0)
        assert transform.alpha.item() == pytest.approx(delta.abs().mean().item(), rel=1e-6)
    for name in ("stem_bn.weight", "stem_bn.bias", "stem_bn.running_mean", "stem_bn.running_var"):
        assert torch.equal(weights[name], state[name])
    torch.testing.assert_close(weights["plain.bias"], state["plain.bias"])
    assert torch.equal(domain.head.weight, state["fc.weight"])
    assert torch.equal(domain.head.bias, state["fc.bias"])
    assert domain.method.name == "bitdelta"
    assert domain.classes == ["class 0", "class 1", "class 2"]
    assert domain.input == base.input
    assert converted.outputs is None
    assert converted.left == {}
    base.verify()


def test_the_distance_of_the_weights_is_what_the_signs_miss(base, state):
    distance = convert(base, state).weights
    changed = missed = 0.0
    for name in base.sites:
        delta = (state[name] - base.tensor(name)).double()
        mask, alpha = nearest(delta)
        rest = (delta - alpha * (2 * mask.double() - 1)).square().sum()
        assert distance.sites[name] == pytest.approx(math.sqrt(rest / delta.square().sum()), 1e-3)
        changed, missed = changed + delta.square().sum(), missed + rest
    assert distance.error == pytest.approx(math.sqrt(missed / changed), rel=1e-3)
    assert 0.2 < distance.error < 0.95
    assert 0 < distance.change < 1


def test_a_network_of_which_only_the_head_was_trained_is_kept_exactly(base, data, loaders):
    state = tiny_net().state_dict()
    state["fc.weight"], state["fc.bias"] = torch.randn(3, 12), torch.randn(3)
    options = {"data": data, "recipe": RECIPE, "loaders": loaders, "statistics": "checkpoint"}
    converted = convert(base, state, steps=3, **options)
    assert converted.outputs.max == 0
    assert converted.outputs.agreement == 100
    assert converted.weights == dataclasses.replace(converted.weights, change=0, error=0, sites={})


def test_what_a_domain_cannot_hold_is_named_with_its_largest_change():
    class Tokened(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.scale = nn.Parameter(torch.zeros(1, 8)), nn.Parameter(torch.ones(8))
            self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

        def forward(self, x):
            return self.fc(self.conv(x).mean((2, 3)) * self.scale + self.token)

    torch.manual_seed(0)
    net = Tokened()
    base = pm.load_base(net, name="tokened", input=SPEC)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state["token"][0, 3] -= 0.5
    state["conv.bias"] += 0.25
    converted = convert(base, state)
    assert converted.left == {"token": 0.5}


def test_classes_come_from_a_list_from_the_data_or_from_numbers(base, state, data):
    tuned = Finetuned.read(base, state)
    assert name_outputs(tuned, None, None)[1] == ["class 0", "class 1", "class 2"]
    assert name_outputs(tuned, ["x", "y", "z"], None)[1] == ["x", "y", "z"]
    _, names, labelled, notes = name_outputs(tuned, None, data)
    assert (names, labelled) == (list(NAMES), True)
    assert "in the order of trees's classes" in notes[0]
    _, names, labelled, notes = name_outputs(tuned, ["x", "y", "z"], data)
    assert (names, labelled) == (["x", "y", "z"], False)
    assert "labels are not used" in notes[0]


def test_outputs_in_another_order_are_brought_into_the_datas(base, state, data, loaders):
    order = [2, 0, 1]
    shuffled = state | {n: state[n][order] for n in ("fc.weight", "fc.bias")}
    names = [NAMES[i] for i in order]
    options = {"data": data, "recipe": RECIPE, "loaders": loaders, "steps": 0}
    converted = convert(base, shuffled, classes=names, **options)
    assert same_stored(converted.domain, convert(base, state, **options).domain)
    assert converted.domain.classes == list(NAMES)


def test_a_wrong_number_of_classes_is_refused(base, state, data):
    with pytest.raises(ConvertError, match="has 3 classes, but 2 are named"):
        convert(base, state, classes=["a", "b"])
    train = data.train.relabelled([3, 3, *data.train.labels[2:]])
    four = dataclasses.replace(data, classes=(*NAMES, "dogwood"), train=train)
    with pytest.raises(ConvertError, match="has 3 classes, trees has 4"):
        convert(base, state, data=four)
    with pytest.raises(ConvertError, match="needs images of the checkpoint's classes"):
        convert(base, state, train_masks=True)
    with pytest.raises(ConvertError, match="needs images of the checkpoint's classes"):
        convert(base, state, data=data, classes=["a", "b", "c"], train_masks=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"statistics": "mine"}, "statistics='mine' is not one of"),
        ({"steps": -1}, "steps=-1"),
        ({"rate": 0.0}, "rate=0.0"),
        ({"side": 0}, "side=0 must be a number of pixels"),
    ],
)
def test_senseless_options_are_refused_by_name(base, state, options, message):
    with pytest.raises(ConvertError, match=message):
        convert(base, state, **options)


def test_distillation_brings_the_outputs_nearer_and_changes_the_scales_alone(base, state, data, loaders):
    options = {"data": data, "recipe": RECIPE, "loaders": loaders, "statistics": "checkpoint"}
    before = one_bit_domain(base, Finetuned.read(base, state), NAMES)
    after = convert(base, state, steps=60, **options)
    assert after.outputs.relative < 0.9 * after.unrefined.relative
    assert after.outputs.images == 60
    assert after.outputs.split == "test"
    for name, now in after.domain.stored().items():
        then = before.stored()[name]
        equal = torch.equal(getattr(now, "words", now), getattr(then, "words", then))
        assert equal != name.endswith("/alpha"), name
    assert all(t.alpha > 0 for _, t in after.domain.named_transforms())
    assert same_stored(after.domain, convert(base, state, steps=60, **options).domain)
    base.verify()


@pytest.mark.parametrize("method", ["bitdelta-row", "bitdelta-column"])
def test_sizes_of_rows_or_columns_miss_less_and_are_refined_one_by_one(base, state, data, loaders, method):
    options = {"data": data, "recipe": RECIPE, "loaders": loaders, "statistics": "checkpoint"}
    one_size, before = (one_bit_domain(base, Finetuned.read(base, state), NAMES, m) for m in ("bitdelta", method))
    after = convert(base, state, method=method, steps=60, **options)
    assert after.domain.method.name == method
    assert after.weights.error > 0
    assert convert(base, state, method=method).weights.error < convert(base, state).weights.error
    assert after.outputs.relative < 0.9 * after.unrefined.relative
    refined, fresh, single = (dict(d.named_transforms())["plain.weight"] for d in (after.domain, before, one_size))
    assert single.alpha.shape == (1,)
    assert refined.alpha.shape == (16,)
    assert len((refined.alpha / fresh.alpha).unique()) > 1
    assert torch.equal(refined.mask(), single.mask())


def test_a_checkpoint_becomes_signs_and_nothing_else(base, state):
    with pytest.raises(ConvertError, match="not converted to finetune; take bitdelta"):
        convert(base, state, method="finetune")


def test_masks_do_not_go_on_from_sizes_of_columns(base, state, data):
    with pytest.raises(ConvertError, match="bitdelta-column has a size for each column"):
        convert(base, state, method="bitdelta-column", data=data, train_masks=True)


def test_the_statistics_that_bring_the_outputs_nearer_on_val_are_kept(base, state, data, loaders):
    on_val = dataclasses.replace(loaders, test=None)
    errors = {
        wanted: convert(
            base, state, data=data, recipe=RECIPE, loaders=on_val, steps=0, statistics=wanted
        ).outputs.relative
        for wanted in ("checkpoint", "images", "auto")
    }
    assert errors["checkpoint"] != errors["images"]
    assert errors["auto"] == min(errors.values())


def test_statistics_are_of_images_of_the_domains_size_where_a_recipe_begins_with_smaller_ones(base, state, data):
    how = {"data": data, "method": "bitdelta", "steps": 0, "statistics": "images"}
    plain, early = (
        convert(base, state, recipe=dataclasses.replace(RECIPE, first_side=side), **how).domain for side in (None, 8)
    )
    for (_, norm), (_, other) in zip(plain.named_norms(), early.named_norms(), strict=True):
        assert torch.equal(norm.running_mean, other.running_mean)


def test_a_pack_says_with_which_seed_its_images_were_cut(base, state, data):
    found = [
        convert(base, state, data=dataclasses.replace(data, seed=cut), recipe=RECIPE, steps=0, seed=1).domain.recipe
        for cut in (None, 1, 3)
    ]
    assert [(note["seed"], split_seed(note)) for note in found] == [(1, 1), (1, 1), (1, 3)]


def test_accuracies_of_the_checkpoint_and_of_the_pack_are_measured(base, refined, tuned_net, loaders):
    outputs = refined.outputs
    images, labels = zip(*loaders.test.batches(), strict=True)
    with torch.no_grad():
        guesses = tuned_net(torch.cat(images)).argmax(1)
    right = 100 * (guesses == torch.cat(labels)).double().mean().item()
    assert outputs.checkpoint_accuracy == pytest.approx(right)
    assert outputs.pack_accuracy == evaluate(base, refined.domain, loaders.test)
    assert refined.domain.metrics["test_accuracy"] == outputs.pack_accuracy
    assert 0 < outputs.mean <= outputs.max
    assert outputs.agreement > 80


def test_a_saved_pack_gives_the_same_outputs_and_merges_to_the_networks_names(base, refined, tuned_net, tmp_path):
    refined.domain.save(tmp_path / "trees.safetensors")
    loaded = pm.load_domain(tmp_path / "trees.safetensors", base)
    merged = loaded.merged(base)
    with torch.no_grad():
        expected = refined.domain(base, batch()[0])
        assert torch.equal(loaded(base, batch()[0]), expected)
        assert torch.equal(merged(batch()[0]), expected)
    assert merged.state_dict().keys() == tuned_net.state_dict().keys()
    assert loaded.classes == list(NAMES)
    assert loaded.metrics == refined.domain.metrics


def test_masks_that_learn_on_are_no_worse(base, state, data, loaders, refined):
    seen = []

    class Watch(Listener):
        def epoch(self, record, seconds):
            seen.append(record.val_accuracy)

    options = {"data": data, "recipe": RECIPE, "loaders": loaders, "steps": 60}
    learned = convert(base, state, train_masks=True, listener=Watch(), **options)
    assert learned.domain.method.name == "affine-full"
    assert learned.domain.method.norms == "own"
    assert len(seen) == RECIPE.epochs
    val = learned.domain.metrics["val_accuracy"]
    assert val == evaluate(base, learned.domain, loaders.val) >= max(seen)
    assert learned.outputs.pack_accuracy >= refined.outputs.pack_accuracy - 2
    assert not any(p.requires_grad for p in learned.domain.parameters())
    assert set(learned.left) == {"plain.bias", "hidden.bias"}
    base.verify()


def test_a_network_that_does_not_come_from_the_base_is_remarked_on(base):
    notes = convert(base, tiny_net(seed=7).state_dict()).notes
    assert any("make sure that the network was fine-tuned from this base" in n for n in notes)
