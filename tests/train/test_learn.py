"""What `learn` shows while it runs, and what it gives."""

import builtins
import io
import sys

import pytest

import polymask as pm
from image_folders import make_folder
from nets import tiny_base

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
