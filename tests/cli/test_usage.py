"""How commands are explained: help, and what is wrong with one, in a line or two."""

import os
import subprocess
import sys

import pytest

from polymask.cli import main
from polymask.cli.parser import VERBS
from polymask.cli.usage import in_flags, options_of

HIDING = """
import importlib.util, sys
hidden, real = sys.argv[1].split(","), importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in hidden else real(name, *rest)
sys.modules.update(dict.fromkeys(hidden))
from polymask.cli import main
sys.exit(main(sys.argv[2:]))
"""


def test_every_option_of_every_verb_has_a_line_of_help():
    for name, verb in VERBS.items():
        for option in options_of(verb):
            assert len(option.meaning) > 5, (name, option.name)


def test_help_fits_into_the_terminal_and_has_titles(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for name in VERBS:
        with pytest.raises(SystemExit) as stopped:
            main([name, "--help"])
        assert stopped.value.code == 0
        printed = capsys.readouterr().out
        lines = printed.splitlines()
        assert max(map(len, lines[1:])) <= 80, name
        assert "For every verb:" in lines
        assert "overrides" not in printed
    with pytest.raises(SystemExit):
        main(["learn", "--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("polymask learn NAME --data TEXT")
    assert "How it trains (as the recipe has it unless given):" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lern"], "there is no verb 'lern'; did you mean learn?"),
        (["train"], "there is no verb 'train'; did you mean learn?"),
        (["learn", "x", "--data", "y", "--lr", "1"], "learn has no option --lr; did you mean --rate?"),
        (["learn", "x", "--data", "y", "--epoch", "1"], "learn has no option --epoch; did you mean --epochs?"),
        (["learn", "x", "--data", "y", "--epochs", "two"], "--epochs two: give a whole number"),
        (["learn", "x", "--data", "y", "--epochs"], "--epochs needs a value: --epochs N"),
        (["learn", "x", "--data", "y", "--optimiser", "adm"], "--optimiser adm: did you mean adam?"),
        (["learn"], "learn needs NAME and --data TEXT"),
        (["list", "a", "b"], "list does not know what to do with 'b'"),
    ],
)
def test_a_command_that_makes_no_sense_is_explained_in_two_lines(capsys, words, message):
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[0]
    assert len(lines) <= 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["learn", "x", "--data", "digits", "--side", "0"], "--side 0 must be from 1 to 2,048 pixels"),
        (["learn", "x", "--data", "digits", "--side", "-5"], "--side -5 must be from 1"),
        (["learn", "x", "--data", "digits", "--side", "20000"], "--side 20000 must be from 1"),
        (["learn", "x", "--data", "digits", "--resized", "0"], "--resized 0 must be from 1"),
        (["learn", "x", "--data", "digits", "--seed", str(2**64)], f"--seed {2**64} must be from 0"),
        (["learn", "x", "--data", "digits", "--method", "afine-full"], "did you mean affine-full?"),
        (["learn", "x", "--data", "digits", "--method", "affine-full:lr=1"], "did you mean rate?"),
        (["learn", "x", "--data", "digits", "--train-on-val", "true"], "--train-on-val leaves no val to select on"),
        (["learn", "x", "--data", "digits", "--fresh", "--resume"], "give one of them"),
        (["learn", "x", "--data", "digits", "--out", "taken"], "taken is not a folder"),
        (["learn", "x", "--data", "digits", "--device", "gpu"], "device 'gpu' does not work here; there is"),
        (["pretrain", "resnet18-64", "--data", "x", "--out", "a", "--device", "gpu"], "device 'gpu' does not work"),
        (["serve", "nowhere", "--device", "gpu"], "device 'gpu' does not work here"),
        (["predict", "flowers"], "predict NAME FILES"),
    ],
)
def test_what_can_be_known_is_said_before_images_are_read(capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    (tmp_path / "flowers").touch()
    monkeypatch.setattr("polymask.data.load.load_data", None)  # it would be called
    assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("hidden", "words", "message"),
    [
        ("tyro,rich", ["list"], "needs tyro and rich; pip install 'polymask[cli]'"),
        ("fastapi", ["serve", "library"], "serve needs fastapi, not installed; pip install 'polymask[serve]'"),
        ("onnx", ["export", "a", "--onnx", "b"], "pip install 'polymask[export]'"),
        ("PIL", ["learn", "a", "--data", "b"], "pip install 'polymask[vision]'"),
        ("matplotlib", ["report", "runs"], "pip install 'polymask[plot]'"),
        ("tensorboard", ["learn", "a", "--data", "b", "--tensorboard"], "pip install tensorboard"),
    ],
)
def test_an_extra_that_is_missing_is_named_in_a_line(hidden, words, message, tmp_path):
    command = [sys.executable, "-c", HIDING, hidden, *words]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert message in line


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "polymask", "learn", "--help"]
    run = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (run.returncode, run.stderr) == (0, "")


def test_ctrl_c_while_a_command_is_read_ends_in_a_line(monkeypatch, capsys):
    def stop(words):
        raise KeyboardInterrupt

    monkeypatch.setattr("polymask.cli.parser.parse", stop)
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "polymask: stopped\n"


def test_errors_speak_of_flags():
    verb = VERBS["learn"]
    assert in_flags("epochs=0 must be at least 1", verb) == "--epochs 0 must be at least 1"
    assert in_flags("set selection='last', or head_rate=0.1.", verb) == "set --selection last, or --head-rate 0.1."
    assert in_flags("lora-conv:rank=4 and pretrained=False", verb) == "lora-conv:rank=4 and pretrained=False"
