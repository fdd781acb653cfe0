"""polymask convert, run as users run it."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from polymask.cli import main
from polymask.nets.zoo import build
from polymask.pack.format import inspect

BASE = ["--base", "efficientnet-lite0"]
SMALL = ["--side", "32", "--scale-steps", "4", "--json"]


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A folder with images of ten classes, and a checkpoint: the base's weights moved a little."""
    room = tmp_path_factory.mktemp("room")
    net, _ = build("efficientnet-lite0")
    torch.manual_seed(0)
    net.classifier = torch.nn.Linear(1280, 10)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.03 * parameter.std(correction=0) * torch.randn_like(parameter))
    state = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    save_file(state, room / "digits.safetensors")
    torch.save({"model": {f"module.{n}": t for n, t in state.items()}}, room / "digits.pth")
    (room / "names.txt").write_text("\n".join(f"digit {i}" for i in range(10)) + "\n\n")
    rng = np.random.default_rng(0)
    for label in range(10):
        (room / "pictures" / f"{label}").mkdir(parents=True)
        for i in range(8):
            pixels = rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(room / "pictures" / f"{label}" / f"{i}.png")
    return room


@pytest.fixture(scope="module")
def with_data(room):
    words = ["convert", str(room / "digits.pth"), *BASE, "--name", "refined", *SMALL]
    words += ["--data", str(room / "pictures"), "--out", str(room / "library")]
    printed, said = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(said):
        assert main(words) == 0
    return json.loads(printed.getvalue()), said.getvalue()


def test_a_checkpoint_and_images_give_a_pack_and_its_distance(room, with_data):
    result, said = with_data
    pack = room / "library" / "refined.safetensors"
    assert result["pack"] == str(pack)
    assert result["method"] == "bitdelta"
    assert result["bytes"] == pack.stat().st_size < 1_000_000
    assert 1 < result["bits_per_weight"] < 1.8
    assert result["outputs"]["split"] == "test"
    assert result["outputs"].keys() == result["outputs_unrefined"].keys()
    assert result["outputs"]["relative"] < 1
    assert result["test_accuracy"] == result["outputs"]["pack_accuracy"]
    assert 0.5 < result["weights"]["error"] < 0.7  # normally distributed changes: 0.603
    assert result["left"] == {}
    assert "digits.pth, base efficientnet-lite0 at 32 px" in said
    manifest = inspect(pack).manifest
    assert manifest.classes == [str(i) for i in range(10)]
    assert manifest.input["shape"] == [3, 32, 32]
    assert manifest.recipe["checkpoint"] == "digits.pth"


def test_a_checkpoint_alone_gives_a_pack_with_named_classes(room):
    words = ["convert", "digits.safetensors", *BASE, "--name", "alone", "--classes", "names.txt"]
    run = subprocess.run(
        [sys.executable, "-m", "polymask", *words],
        cwd=room,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "10 classes from digits.safetensors" in run.stderr
    assert "change missed in the weights" in run.stdout
    assert "not compared: give --data" in run.stdout
    manifest = inspect(room / "library" / "alone.safetensors").manifest
    assert manifest.classes == [f"digit {i}" for i in range(10)]
    assert manifest.input["shape"] == [3, 224, 224]


def test_masks_learn_on_from_the_checkpoint(room, monkeypatch, capsys):
    monkeypatch.chdir(room)
    words = ["convert", "digits.pth", *BASE, "--name", "masks", *SMALL]
    assert main([*words, "--data", "pictures", "--train-masks", "--epochs", "1"]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert result["method"] == "affine-full"
    assert "epoch  1/1" in output.err
    recipe = inspect(room / result["pack"]).manifest.recipe
    assert (recipe["epochs"], recipe["side"], recipe["scale_steps"]) == (1, 32, 4)


def test_a_domain_is_not_overwritten_without_force(room, with_data, monkeypatch, capsys):
    monkeypatch.chdir(room)
    before = (room / "library" / "refined.safetensors").read_bytes()
    words = ["convert", "digits.safetensors", *BASE, "--name", "refined"]
    assert main(words) == 1
    error = capsys.readouterr().err.strip()
    assert error == ("polymask: library/refined.safetensors exists; choose another name, or --force to replace it")
    assert (room / "library" / "refined.safetensors").read_bytes() == before
    assert main([*words, "--force", "--out", "library"]) == 0
    assert (room / "library" / "refined.safetensors").read_bytes() != before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.pth"], "no weights at nothing.pth"),
        (["digits.pth", "--name", "a/b"], "'a/b' cannot name a domain"),
        (["digits.pth", "--classes", "none.txt"], "none.txt cannot be read"),
        (["digits.pth", "--classes", "short.txt"], "digits.pth has 10 classes, but 2 are named"),
        (["digits.pth", "--data", "letters"], "digits.pth has 10 classes, letters has 26"),
        (["digits.pth", "--train-masks"], "--train-masks needs labelled images; give --data"),
        (["names.txt"], "names.txt holds something else beside tensors"),
        (["other.safetensors"], "other.safetensors does not fit base efficientnet-lite0: it lacks"),
    ],
)
def test_errors_are_one_line_and_nothing_is_written(room, monkeypatch, capsys, words, message):
    monkeypatch.chdir(room)
    (room / "short.txt").write_text("a\nb\n")
    save_file({"conv.weight": torch.zeros(3)}, room / "other.safetensors")
    assert main(["convert", *BASE, "--name", "x", "--out", "new", *words]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("polymask: ")
    assert message in error
    assert "\n" not in error
    assert not (room / "new").exists()
