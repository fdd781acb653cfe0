"""Pretraining: a whole network learns, resumes to the bit, and becomes a base's file."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import polymask as pm
from nets import tiny_net
from polymask.errors import InterruptedTraining, TrainingError
from polymask.nets.base_file import read_notes
from polymask.nets.zoo import build
from polymask.train.fit import Listener
from polymask.train.learn import make_loaders
from polymask.train.pretrain import NetworkLearner, pretrain
from polymask.train.recipe import get_recipe
from polymask.train.state import CheckpointError

NET = "timm:test_efficientnet"  # a network of 100,000 parameters that timm has for tests
RECIPE = get_recipe("pretrain", epochs=3, drops=(2,), batch_size=32, side=32, rate=0.05)


@pytest.fixture(scope="module")
def digits():
    data = pm.load_data("digits", limit=96)
    _, spec = build(NET, pretrained=False, device="meta")
    return data, make_loaders(data, spec, RECIPE)


@pytest.fixture(scope="module")
def whole(digits):
    """A run that nobody disturbs."""
    return run(digits)


@pytest.fixture(scope="module")
def file(whole, tmp_path_factory):
    path = tmp_path_factory.mktemp("bases") / "digits.safetensors"
    whole.save(path)
    return path


def run(digits, **options):
    """The run of `whole`, disturbed."""
    data, loaders = digits
    return pretrain(**({"name": NET, "data": data, "recipe": RECIPE, "loaders": loaders} | options))


def same(a, b):
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


class At(Listener):
    """Does something in the middle of training."""

    def __init__(self, epoch, step, act):
        self.place, self.act = (epoch, step), act

    def step(self, epoch, step, loss, images, density):
        assert density is None
        if (epoch, step) == self.place:
            self.act()


def test_the_recipe_is_that_of_the_decathlons_base():
    recipe = get_recipe("pretrain")
    assert (recipe.epochs, recipe.batch_size, recipe.optimiser) == (120, 128, "sgd")
    assert (recipe.rate, recipe.momentum, recipe.weight_decay) == (0.1, 0.9, 1e-4)
    assert [recipe.factor(epoch) for epoch in (0, 79, 80, 99)] == pytest.approx([1, 1, 0.1, 0.1])
    assert recipe.factor(100) == pytest.approx(0.01)
    _, spec = build("decathlon-wrn28", pretrained=False, device="meta")
    shown = recipe.input(spec)
    assert (shown.side, round(shown.side / shown.crop), recipe.crop_scale) == (64, 72, (1.0, 1.0))


def test_a_network_learns_from_random_weights():
    data = pm.load_data("digits", limit=400)
    recipe = dataclasses.replace(RECIPE, epochs=5, drops=(4,), rate=0.1)
    learned = pretrain(NET, data, recipe)
    assert learned.test_accuracy > 50  # a guess is right in 10
    assert [record.epoch for record in learned.history] == list(range(5))
    assert learned.metrics["val_accuracy"] == max(r.val_accuracy for r in learned.history)
    assert not learned.net.training


def test_a_decathlon_network_takes_a_step():
    data = pm.load_data("digits", limit=10)
    recipe = dataclasses.replace(RECIPE, epochs=1, batch_size=10, side=16)
    learned = pretrain("decathlon-wrn28", data, recipe)
    assert learned.base().feature_dim == 256
    assert learned.net.fc.out_features == 10


def test_every_parameter_learns_and_every_weight_decays():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, _ = build("timm:test_vit", pretrained=False, classes=3)  # tokens, positions, scales
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        images, labels = torch.randn(4, 3, 160, 160), torch.tensor([0, 1, 2, 0])
    recipe = dataclasses.replace(RECIPE, weight_decay=0.0)
    plain, decayed = (
        _after_a_step(net, before, dataclasses.replace(recipe, weight_decay=decay), images, labels)
        for decay in (0.0, 0.5)
    )
    for name, start in before.items():
        assert not torch.equal(plain[name], start) or not start.any(), name
        # SGD takes rate · decay · w off every weight, whatever its kind.
        off = plain[name] - decayed[name]
        torch.testing.assert_close(off, RECIPE.rate * 0.5 * start, atol=1e-6, rtol=1e-3)


def _after_a_step(net, start, recipe, images, labels):
    net.load_state_dict(start, strict=False)
    learner = NetworkLearner(net.eval(), recipe)  # no dropout: both see the same
    learner.step(images, labels, 0.0)
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def test_labels_are_smoothed_and_rates_warm_up():
    net = tiny_net()
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8)
    losses = []
    for smoothing in (0.0, 0.1):
        recipe = dataclasses.replace(RECIPE, label_smoothing=smoothing, epochs=4, warmup=2.0)
        learner = NetworkLearner(net.eval(), recipe)
        losses.append(learner.step(images, labels, 0.0)[0])
        assert learner.optimisers["network"].param_groups[0]["lr"] == 0.0
    learner.step(images, labels, 1.0)
    assert learner.optimisers["network"].param_groups[0]["lr"] == RECIPE.rate / 2
    assert losses[0] != losses[1]


def test_equal_seeds_give_equal_networks_and_others_do_not(digits):
    recipe = dataclasses.replace(RECIPE, epochs=1, drops=())
    torch.rand(7)  # what was drawn before has no say
    first, again, other = (run(digits, recipe=recipe, seed=seed) for seed in (0, 0, 1))
    assert same(first.net, again.net)
    assert not same(first.net, other.net)


@pytest.mark.parametrize(
    ("place", "number"), [((0, 1), signal.SIGINT), ((1, 3), signal.SIGTERM), ((2, 2), signal.SIGINT)]
)
def test_a_stopped_run_resumes_to_the_bit(digits, whole, tmp_path, place, number):
    checkpoint = tmp_path / "c.safetensors"
    stop = At(*place, lambda: os.kill(os.getpid(), number))
    with pytest.raises(InterruptedTraining, match="the same again with resume goes on from there"):
        run(digits, checkpoint=checkpoint, listener=stop)
    torch.manual_seed(1234)
    resumed = run(digits, checkpoint=checkpoint, resume=True)
    assert resumed.history == whole.history
    assert same(resumed.net, whole.net)


def test_a_run_that_dies_in_an_epoch_resumes_from_the_one_before_to_the_same_file(digits, file, tmp_path):
    class CutError(Exception):
        pass

    def die():
        raise CutError

    checkpoint = tmp_path / "c.safetensors"
    with pytest.raises(CutError):
        run(digits, checkpoint=checkpoint, listener=At(1, 2, die))
    resumed = run(digits, checkpoint=checkpoint, resume=True)
    resumed.save(tmp_path / "base.safetensors")
    assert (tmp_path / "base.safetensors").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"recipe": dataclasses.replace(RECIPE, rate=0.2)}, "rate 0.05 → 0.2"),
        ({"seed": 3}, "seed 0 → 3"),
        ({"name": "timm:test_resnet"}, "network .* → timm:test_resnet"),
        ({"data": pm.load_data("digits", limit=64)}, "training set digits, 96 → digits, 64"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(digits, tmp_path, change, what):
    checkpoint = tmp_path / "c.safetensors"
    stop = At(0, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(InterruptedTraining):
        run(digits, checkpoint=checkpoint, listener=stop)
    with pytest.raises(CheckpointError, match=f"is of a run with other settings: {what}"):
        run(digits, checkpoint=checkpoint, resume=True, **change)


def test_the_best_epoch_or_the_last_is_kept_as_the_recipe_says(digits):
    seen = []

    def kept(selection):
        class Watch(Listener):
            def epoch(self, record, seconds):
                seen.append(record.val_accuracy)

        recipe = dataclasses.replace(RECIPE, selection=selection, rate=0.2, drops=())
        learned = run(digits, recipe=recipe, listener=Watch())
        again = NetworkLearner(learned.net, recipe).measure(digits[1].val)
        assert learned.metrics["val_accuracy"] == again
        return again

    assert kept("best") == max(seen)
    assert kept("last") == seen[-1]
    with pytest.raises(TrainingError, match="selection='best' needs val"):
        run(digits, loaders=dataclasses.replace(digits[1], val=None))


@pytest.mark.parametrize(
    ("name", "side", "message"),
    [
        ("resnet26", 32, "base 'resnet26' is not known"),
        ("torchvision:resnet55", 32, "no model 'resnet55'; did you mean"),
        ("timm:vit_tiny_patch16_224", 32, r"does not run on images of shape .*; give another side"),
        ("torchvision:googlenet", 64, "has auxiliary classifiers"),
    ],
)
@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
def test_a_network_that_cannot_be_trained_is_refused_before_images_are_read(digits, name, side, message):
    with pytest.raises(pm.BaseError, match=message):
        pretrain(name, digits[0], dataclasses.replace(RECIPE, side=side))


def test_a_base_is_loaded_by_its_path_alone(whole, file):
    for source in (str(file), file):
        base = pm.load_base(source)
        assert base.name == NET  # what packs are to say, on any machine
        assert base.input == whole.input
        assert base.input.side == 32
        assert base.fingerprint == whole.base().fingerprint
        assert torch.equal(base.head.weight, whole.net.classifier.weight)
    notes = read_notes(file)
    assert notes.classes == list(whole.classes) == [str(i) for i in range(10)]
    assert notes.recipe["name"] == "pretrain"
    assert notes.metrics == whole.metrics
    assert notes.library == pm.__version__


def polymask(*words, cwd, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "polymask", *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.slow
def test_from_pretrain_to_a_domain_on_the_command_line(tmp_path):
    words = ["pretrain", NET, "--data", "digits", "--out", "bases/d.safetensors"]
    small = ["--side", "32", "--limit", "64", "--epochs", "2", "--drops", "1"]
    done = polymask(*words, *small, "--json", cwd=tmp_path)
    result = json.loads(done.stdout)
    path = tmp_path / "bases/d.safetensors"
    assert result["base"] == "bases/d.safetensors"
    assert (result["net"], result["class_count"]) == (NET, 10)
    assert result["bytes"] == path.stat().st_size
    assert result["fingerprint"] == pm.load_base(path).fingerprint
    assert 0 <= result["test_accuracy"] <= 100
    assert "recipe pretrain (2 epochs at 32 px)" in done.stderr
    files = {each.name for each in (tmp_path / "bases/d.run").iterdir()}
    assert files == {"log.jsonl"}

    again = polymask(*words, *small, cwd=tmp_path, code=1)
    assert "bases/d.safetensors exists" in again.stderr
    assert "nothing to resume" in polymask(*words, *small, "--resume", cwd=tmp_path).stderr

    letters = ["learn", "letters", "--data", "letters", "--base", path, *small]
    learned = json.loads(polymask(*letters, "--json", cwd=tmp_path).stdout)
    assert learned["base"] == NET
    evaluate = ["evaluate", "letters", "--data", "letters", "--json"]
    for option in ("--base", "--weights"):
        shown = json.loads(polymask(*evaluate, option, path, cwd=tmp_path).stdout)
        assert shown["test_accuracy"] == learned["test_accuracy"]
    account = json.loads(polymask("account", "--base", path, "--json", cwd=tmp_path).stdout)
    assert account["base"] == NET


def test_the_command_says_what_is_wrong_in_one_line(tmp_path, capsys, monkeypatch):
    from polymask.cli import main

    monkeypatch.chdir(tmp_path)
    for out, net, message in (
        ("b.pth", NET, "b.pth cannot be a base's file"),
        ("b.safetensors", "resnet26", "base 'resnet26' is not known"),
    ):
        assert main(["pretrain", net, "--data", "digits", "--out", out]) == 1
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
