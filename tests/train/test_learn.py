"""What `learn` shows while it runs, and what it gives."""

import builtins
import dataclasses
import io
import math
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import polymask as pm
from image_folders import make_folder
from nets import SPEC, tiny_base
from polymask.data.loader import loader_at
from polymask.train.fit import Listener, fit
from polymask.train.learn import images_of_epoch, make_loaders
from polymask.train.recipe import split_seed
from tables import make_values

RECIPE = {"epochs": 2, "batch_size": 8, "side": 16}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("images"), train=10)


def learn(folder, **how):
    return pm.learn(tiny_base(), folder, "affine-full", pm.get_recipe("quick", **RECIPE), **how)


def test_learn_shows_its_epochs_where_people_watch_or_ask(folder, monkeypatch, capsys):
    learn(folder)
    assert capsys.readouterr().err == ""
    learn(folder, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "epoch  1/2" in shown.err
    assert "epoch  2/2" in shown.err
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    learn(folder)
    assert "2/2" in terminal.getvalue()
    terminal.truncate(0)
    learn(folder, progress=False)
    assert terminal.getvalue().strip("\0") == ""


def test_progress_without_rich_is_an_error_only_where_it_was_asked_for(folder, monkeypatch):
    real = builtins.__import__

    def without_rich(name, *rest):
        if name.startswith(("rich", "polymask.train.progress")):
            raise ImportError("No module named 'rich'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    with pytest.raises(pm.TrainingError, match=r"needs rich .*pip install 'polymask\[cli\]'"):
        learn(folder, progress=True)


def test_what_was_learned_shows_itself_in_a_line_and_as_curves(folder):
    learned = learn(folder)
    assert repr(learned).startswith("Learned(affine-full on tiny, 2 classes: 2 epochs, ")
    assert f"{learned.test_accuracy:.2f} % on test" in repr(learned)
    losses, accuracies = learned.plot().axes
    assert losses.lines[0].get_ydata().tolist() == [record.loss for record in learned.history]
    assert [line.get_label() for line in accuracies.lines] == ["train", "val", "test"]
    assert f"accuracy {learned.test_accuracy:.2f} % on test" in repr(learned.domain)


def test_what_is_said_of_val_is_of_the_epoch_that_is_kept(folder, monkeypatch):
    base, recipe = tiny_base(), pm.get_recipe("quick", **RECIPE, selection="last", precision=32)
    data = pm.load_data(folder)

    def fit_and_forget(*given, **how):
        first, *others = fit(*given, **how)
        return [dataclasses.replace(first, val_accuracy=101.0), *others]  # better than what is kept

    monkeypatch.setattr("polymask.train.learn.fit", fit_and_forget)
    learned = pm.learn(base, data, "affine-full", recipe)
    val = pm.evaluate(base, learned.domain, loader_at(data.val, learned.domain.input))
    assert learned.domain.metrics["val_accuracy"] == val <= 100


@pytest.fixture(params=["a folder", "its images", "batches", "a set", "a loader of torch"])
def images(request, folder):
    """Some images, however they come, and how many there are to learn from; 16, where only batches can be counted."""
    data = pm.load_data(folder)
    torch.manual_seed(0)
    pairs = [(torch.rand(3, 16, 16), number % 2) for number in range(16)]
    match request.param:
        case "a folder":
            return {"data": folder}, len(data.train)
        case "its images":
            return {"data": data}, len(data.train)
        case "batches":
            return {"data": data, "loaders": make_loaders(data, SPEC, pm.get_recipe("quick", **RECIPE))}, 16
    train = pairs if request.param == "a set" else DataLoader(pairs, batch_size=8)
    return {"data": {"train": train, "val": pairs}, "classes": ["a", "b"]}, 16


def test_few_images_are_gone_through_more_often_however_they_come(images):
    given, count = images
    recipe = pm.get_recipe("quick", batch_size=8, side=16, least_steps=8 * math.ceil(count / 8))
    learned = pm.learn(tiny_base(), method="bn-only", recipe=recipe, **given)
    assert [record.epoch for record in learned.history] == list(range(8))
    assert learned.domain.recipe["epochs"] == 8


def test_val_counts_where_it_is_learned_from(folder):
    data = pm.load_data(folder)
    recipes = [pm.get_recipe("quick", train_on_val=given, selection="last") for given in (False, True)]
    counts = [images_of_epoch(data, recipe) for recipe in recipes]
    assert counts == [len(data.train), len(data.train) + len(data.val)]


def test_images_that_come_as_a_stream_are_gone_through_as_often_as_epochs_say():
    class Stream(IterableDataset):
        def __iter__(self):
            torch.manual_seed(0)
            yield from [(torch.rand(3, 16, 16), number % 2) for number in range(16)]

    recipe = pm.get_recipe("standard", batch_size=8, side=16, least_steps=100, refit=None, selection="last")
    stream = DataLoader(Stream(), batch_size=8)
    learned = pm.learn(tiny_base(), {"train": stream}, "bn-only", recipe, classes=["a", "b"])
    assert len(learned.history) == recipe.epochs == 6


def test_a_base_of_64_bits_learns_with_the_default_recipe(folder):
    base = pm.Base(tiny_base().net.double(), name="wide", input=SPEC)
    learned = pm.learn(base, folder, recipe=pm.get_recipe("standard", **RECIPE))
    assert learned.domain.head.weight.dtype == torch.float64


def test_options_go_with_a_name_and_not_with_a_method_that_is_made(folder):
    with pytest.raises(pm.MethodError, match="rank cannot be changed in a Lora; make it with them"):
        pm.learn(tiny_base(), folder, pm.create_method("lora"), rank=2)


def test_the_distance_of_scores_is_by_the_recipes_rate_for_a_method_that_is_made_too(folder):
    recipe = pm.get_recipe("quick", **RECIPE, rate=1e-3)
    by_name = pm.learn(tiny_base(), folder, "affine-full", recipe, distance=3).domain
    made = pm.learn(tiny_base(), folder, pm.create_method("affine-full", distance=3), recipe).domain
    assert made.method.scores == by_name.method.scores == (3e-3, 6e-3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"test_side": 24}, "leave test_side=24 out"), ({"frozen_side": 24}, "leave frozen_side=24 out")],
)
def test_a_size_that_the_network_does_not_take_is_refused_before_training(folder, fields, said):
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 16 * 16, 2)

        def forward(self, images):
            return self.fc(self.conv(images).flatten(1))

    base = pm.Base(Fixed(), name="fixed", input=SPEC)
    epochs = []
    listener = type("Seen", (Listener,), {"epoch": lambda self, record, seconds: epochs.append(record)})()
    with pytest.raises(pm.TrainingError, match=said):
        pm.learn(base, folder, "affine-full", pm.get_recipe("quick", **RECIPE, **fields), listener=listener)
    assert epochs == []


@pytest.mark.parametrize("refit", [1, 0.5])
def test_a_head_that_cannot_be_fitted_again_is_refused_before_training(tmp_path, refit):
    data = pm.load_data(make_values(tmp_path), target="values")
    epochs = []
    listener = type("Seen", (Listener,), {"epoch": lambda self, record, seconds: epochs.append(record)})()
    with pytest.raises(pm.TrainingError, match=f"refit={refit} is for classes, and this is a domain of values"):
        pm.learn(tiny_base(), data, "bn-only", pm.get_recipe("quick", **RECIPE, refit=refit), listener=listener)
    assert epochs == []


def test_the_seed_that_cut_the_images_is_kept_where_it_is_another_than_trainings(tmp_path):
    data = pm.load_data(make_folder(tmp_path, train=20) / "train", seed=3)
    noted = [pm.learn(tiny_base(), data, "bn-only", pm.get_recipe("quick", **RECIPE), seed=s).domain for s in (0, 3)]
    assert [split_seed(domain.recipe) for domain in noted] == [3, 3]
    assert "split_seed" not in noted[1].recipe


def test_a_head_that_was_fitted_again_is_not_called_chance(folder):
    learned = learn(folder)
    chance = [dataclasses.replace(record, loss=0.6931, train_accuracy=50.0) for record in learned.history]
    learned.domain.metrics["val_accuracy"] = 50.0
    assert dataclasses.replace(learned, history=chance).at_chance
    learned.domain.metrics["val_accuracy"] = 100.0
    assert not dataclasses.replace(learned, history=chance).at_chance
