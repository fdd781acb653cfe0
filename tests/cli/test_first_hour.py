"""What a new user meets: damaged files, odd names, a run that was cut, advice, narrow terminals."""

import csv
import io
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import tyro
from rich.console import Console

import polymask as pm
from image_folders import draw_image, make_folder
from nets import tiny_net
from polymask.cli import main
from polymask.cli.answers import write_predictions
from polymask.cli.learn import advice
from polymask.cli.verb import given_fields, recipe_overrides
from polymask.core.network import choose_device
from polymask.data.load import load_data
from polymask.train.fit import Listener
from polymask.train.learner import EpochRecord
from polymask.train.progress import LiveProgress

CLASSES = ["dog [small]", "[/b]", ":cat:"]
SMALL = ["--data", "pictures", "--side", "32", "--epochs", "2", "--method", "classifier-only"]


@pytest.fixture
def room(tmp_path, monkeypatch):
    """An empty folder with images, and a library of one pack whose classes have odd names."""
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "pictures", classes=3)
    base = pm.load_base("efficientnet-lite0")
    domain = pm.new_domain(base, "classifier-only", CLASSES)
    domain.save(tmp_path / "library" / "flowers.safetensors")
    return tmp_path


def test_names_are_printed_as_they_are(room, capsys):
    draw_image(room / "a[1].png", 0, 0)
    assert main(["predict", "flowers", "a[[]1].png", "--top", "3"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*CLASSES, "a[1].png"))
    assert main(["show", "flowers"]) == 0
    printed = capsys.readouterr().out
    assert ", ".join(CLASSES) in printed


def test_few_images_are_gone_through_more_often_and_that_is_said(room, capsys):
    few = "learn few --data pictures --side 32 --method classifier-only --test-side none"
    assert main([*few.split(), "--least-steps", "7"]) == 0
    assert "(7 epochs instead of 6, since images are few, at 32 px)" in capsys.readouterr().err
    command = json.loads((room / "library/few.run/evaluation.json").read_text())["command"]
    assert "--least-steps 7" in command
    assert main([*few.split(), "--epochs", "2", "--force"]) == 0
    assert "(2 epochs at 32 px)" in capsys.readouterr().err


def test_predict_skips_damaged_files_and_writes_the_rest(room, capsys):
    folder = room / "a folder with a name that is long enough to be wrapped in any table of a terminal"
    for i in range(2):
        draw_image(folder / f"{i}.png", i, 0)
    (folder / "bad.png").write_text("no image")
    assert main(["predict", "flowers", str(folder), "--top", "1"]) == 1
    printed = capsys.readouterr()
    assert [line.split("\t")[0] for line in printed.out.splitlines()] == [str(folder / f"{i}.png") for i in range(2)]
    assert "bad.png" in printed.err
    assert "1 of 3 files could not be read" in printed.err
    assert main(["predict", "flowers", str(folder), "--top", "2", "--csv", "out.csv"]) == 1
    rows = list(csv.DictReader(io.StringIO((room / "out.csv").read_text())))
    assert [row["rank"] for row in rows] == ["1", "2", "1", "2"]
    assert {row["class"] for row in rows} <= set(CLASSES)
    assert main(["predict", "flower", str(folder)]) == 1
    assert "no domain is named 'flower' in library; did you mean flowers?" in capsys.readouterr().err


def test_a_damaged_pack_is_a_row_of_the_list_and_not_shown(room, capsys):
    pack = room / "library" / "flowers.safetensors"
    data = pack.read_bytes()
    (room / "library" / "cut.safetensors").write_bytes(data[:-1000])
    assert main(["list", "--json"]) == 1
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert "is damaged" in rows["cut"]["problem"]
    assert rows["flowers"]["class_count"] == 3
    assert main(["show", "cut"]) == 1
    assert f"it has {len(data) - 1000:,} bytes and its header tells of {len(data):,}" in capsys.readouterr().err
    assert main(["show", "flowers", "--verify"]) == 0
    flipped = bytearray(data)
    flipped[-10] ^= 1
    (room / "library" / "flipped.safetensors").write_bytes(flipped)
    assert main(["show", "flipped"]) == 0
    assert main(["show", "flipped", "--verify"]) == 1
    assert "its sha256 is not the one" in capsys.readouterr().err


class Stop(Listener):
    """Asks to stop in the second epoch."""

    def step(self, epoch, step, loss, images, density):
        if epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_learn_goes_on_by_itself_where_nothing_has_changed(room, capsys, monkeypatch):
    words = ["learn", "new", *SMALL]
    assert main([*words[:1], "whole", *words[2:]]) == 0
    said = capsys.readouterr()
    assert "kept epoch" in said.out
    assert "computing on" in said.err
    with monkeypatch.context() as patched:
        patched.setattr("polymask.train.progress.LiveProgress", lambda title, target: Stop())
        assert main(words) == 130
    assert "the same command goes on from there" in capsys.readouterr().err
    assert main([*words, "--epochs", "5", "--rate", "0.5"]) == 1
    assert "other settings: epochs 2 → 5, rate 0.001 → 0.5; " in capsys.readouterr().err
    assert main([*words, "--limit", "6"]) == 1
    assert "training images" in capsys.readouterr().err
    assert main(words) == 0
    assert "goes on from epoch 2 of 2; --fresh starts over" in capsys.readouterr().err
    packs = [
        pm.load_domain(f"library/{name}.safetensors", pm.load_base("efficientnet-lite0")) for name in ("whole", "new")
    ]
    (one, other) = (domain.stored() for domain in packs)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_fresh_starts_over(room, capsys, monkeypatch):
    words = ["learn", "new", *SMALL]
    with monkeypatch.context() as patched:
        patched.setattr("polymask.train.progress.LiveProgress", lambda title, target: Stop())
        assert main(words) == 130
    capsys.readouterr()
    assert main([*words, "--fresh"]) == 0
    said = capsys.readouterr().err
    assert "goes on" not in said
    assert "epoch  1/2" in said


def test_advice_looks_at_the_images_first_and_stays_within_sane_rates(tmp_path):
    data = pm.load_data("digits", limit=30)
    assert "there are 30 training images of 10 classes" in advice(data, pm.get_recipe("quick", rate=1e-9))
    data = pm.load_data("digits")
    assert "try --rate 0.0005" in advice(data, pm.get_recipe("quick", rate=1e-9))
    assert "try --rate 0.0005" in advice(data, pm.get_recipe("quick", rate=1e3))
    assert "try --rate 0.0001" in advice(data, pm.get_recipe("quick"))


def test_no_line_of_progress_is_wider_than_80_columns():
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    live = LiveProgress("a-domain-with-a-name-that-is-rather-long", console)
    live.begin(pm.get_recipe("quick", epochs=100), 10_000, 0)
    live.step(99, 9_999, 123.456, 32, 0.5)
    shown = io.StringIO()
    Console(width=300, file=shown, force_terminal=False).print(live.bar.get_renderable())
    live.end()
    live.console = Console(width=80, file=io.StringIO())
    live.epoch(EpochRecord(99, 12.345, 100.0, 100.0), 1234.5)
    for line in (shown.getvalue(), live.console.file.getvalue()):
        assert "100/100" in line
        assert len(line.rstrip()) <= 80


def test_auto_takes_a_device_that_works_and_others_are_refused():
    assert pm.load_base(tiny_net(), input=pm.InputSpec((3, 16, 16)), device="auto").device == choose_device("auto")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(pm.BaseError, match=r"device 'gpu' does not work here; there is .*cpu"):
        pm.load_base(tiny_net(), device="gpu")


def test_a_file_whose_name_is_no_text_is_written_as_it_is(tmp_path):
    odd = os.fsdecode(b"caf\xe9.png")
    write_predictions(tmp_path / "out.csv", [{"image": odd, "top": [{"class": "a", "probability": 1.0}]}])
    assert b"caf\xe9.png,1,a,1.000000" in (tmp_path / "out.csv").read_bytes()
    code = f"import sys; from polymask.cli import main; main(['--version']); print({odd!r})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert b"caf\xe9.png" in said


def test_the_demo_says_when_it_cannot_write(tmp_path, capsys):
    (tmp_path / "demo").write_text("a file")
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 1
    assert "cannot be made" in capsys.readouterr().err


def test_a_folder_is_cut_as_it_was_when_its_domain_was_learned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "images", train=12)
    learn = [
        "learn",
        "one",
        "--data",
        "images/train",
        "--side",
        "32",
        "--epochs",
        "1",
        "--method",
        "classifier-only",
        "--out",
        "packs",
    ]
    assert main([*learn, "--seed", "1", "--keep-exemplars", "2"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "one", "--data", "images/train", "--library", "packs", "--json"]) == 0
    looked_at = {one["image"] for one in json.loads(capsys.readouterr().out)["hardest"]}
    test = {seed: load_data("images/train", seed=seed).test for seed in (0, 1)}
    files = {seed: {split.origin(i) for i in range(len(split))} for seed, split in test.items()}
    assert looked_at
    assert looked_at <= files[1]
    assert not looked_at <= files[0]
    assert (tmp_path / "packs/one.exemplars").exists()
    assert main([*learn, "--force"]) == 0
    assert not (tmp_path / "packs/one.exemplars").exists()  # they were of another pack


def test_a_field_of_the_recipe_can_be_left_out():
    overrides = recipe_overrides("Overrides", without=())
    given = tyro.cli(overrides, args=["--refit", "none", "--test-side", "auto", "--refit-on-val", "false"])
    assert given_fields(given) == {"refit": None, "test_side": "auto", "refit_on_val": False}
