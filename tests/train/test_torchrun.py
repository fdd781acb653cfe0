"""One domain in the processes of torchrun: the same as in one, and clear when it cannot be."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import polymask as pm
from polymask.train.state import load_checkpoint

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[1] / "support"
# Sums in another order may turn a gradient of about zero, and with it a step of Adam (1e-3): a few, never twenty.
TWO_STEPS = 2e-3


def torchrun(*words, ranks=2, module=False, cwd=SUPPORT):
    """Run a script, or polymask, in several ranks; what it printed, and how it ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", *(["-m"] if module else []), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)


def alone(*words):
    command = [sys.executable, "train_in_ranks.py", *map(str, words)]
    subprocess.run(command, cwd=SUPPORT, check=True, capture_output=True, timeout=300)


def largest_difference(one: Path, other: Path) -> float:
    states = [load_checkpoint(folder / "checkpoint") for folder in (one, other)]
    assert states[0]["place"] == states[1]["place"]
    pairs = [(states[0]["domain"][n], states[1]["domain"][n]) for n in states[0]["domain"]]
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("method", ["affine-full", "finetune"])
def test_two_ranks_learn_what_one_process_learns(method, tmp_path):
    alone(tmp_path / "one", "--method", method)
    run = torchrun("train_in_ranks.py", tmp_path / "two", "--method", method, "--sync-norms")
    assert run.returncode == 0, run.stderr
    assert largest_difference(tmp_path / "one", tmp_path / "two") < TWO_STEPS
    found = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("one", "two")]
    for mine, theirs in zip(*(one["history"] for one in found), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)


def test_three_ranks_learn_what_one_process_learns_where_norms_are_the_bases(tmp_path):
    alone(tmp_path / "one", "--norms", "affine")
    run = torchrun("train_in_ranks.py", tmp_path / "three", "--norms", "affine", ranks=3)
    assert run.returncode == 0, run.stderr
    assert largest_difference(tmp_path / "one", tmp_path / "three") < TWO_STEPS


def test_gradients_in_16_bits_take_half_the_bytes_and_learn_nearly_the_same(tmp_path):
    sent = {}
    for name, options in (("full", []), ("half", ["--compress"])):
        run = torchrun("train_in_ranks.py", tmp_path / name, "--method", "finetune", *options)
        assert run.returncode == 0, run.stderr
        sent[name] = json.loads((tmp_path / name / "result.json").read_text())
    assert sent["half"]["bytes"]["gradients"] * 2 == sent["full"]["bytes"]["gradients"]
    losses = [[epoch[0] for epoch in sent[name]["history"]] for name in sent]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_and_it_goes_on_to_the_same_bits(victim, tmp_path):
    options = ["--sync-norms", "--net", "tiny"]  # with dropout
    whole = torchrun("train_in_ranks.py", tmp_path / "whole", *options)
    assert whole.returncode == 0, whole.stderr
    cut = torchrun("train_in_ranks.py", tmp_path / "cut", *options, "--die", victim, 13)
    assert cut.returncode != 0
    assert re.search(r"lost another process.* and saved .*checkpoint; ", cut.stderr)
    assert load_checkpoint(tmp_path / "cut" / "checkpoint")["place"][:2] == [1, 3]
    again = torchrun("train_in_ranks.py", tmp_path / "cut", *options, "--resume")
    assert again.returncode == 0, again.stderr
    assert largest_difference(tmp_path / "whole", tmp_path / "cut") == 0


def test_ranks_with_other_data_do_not_begin(tmp_path):
    run = torchrun("train_in_ranks.py", tmp_path / "x", "--other", 1)
    assert run.returncode != 0
    assert "do not agree on first batch (training): rank 0 has" in run.stderr
    assert not (tmp_path / "x" / "checkpoint").exists()


def test_learn_under_torchrun_is_one_command_with_one_voice(tmp_path):
    words = ["polymask", "learn", "digits", "--data", "digits", "--side", "32", "--limit", "60"]
    words += ["--epochs", "2", "--norms", "own", "--sync-norms", "--json"]
    run = torchrun(*words, module=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert 0 <= result["test_accuracy"] <= 100
    assert run.stderr.count("2 processes (gloo), batch norms over all of them") == 1
    assert run.stderr.count("epoch  1/2") == 1
    assert (tmp_path / "library" / "digits.safetensors").exists()
    assert {f.name for f in (tmp_path / "library" / "digits.run").iterdir()} == {"log.jsonl", "evaluation.json"}


def test_a_stop_signal_to_one_rank_stops_all_at_the_same_step(tmp_path):
    run = torchrun("train_in_ranks.py", tmp_path, "--steps", 3000, "--stop", 1, 5)
    assert run.returncode != 0
    assert "training was asked to stop and saved" in run.stderr
    assert load_checkpoint(tmp_path / "checkpoint")["place"][:2] == [0, 6]


@pytest.mark.parametrize(
    ("example", "package"),
    [("accelerate_loop", "accelerate"), ("fabric_loop", "lightning_fabric")],
)
def test_a_domain_learns_in_the_loops_of_others(example, package, tmp_path):
    pytest.importorskip(package, reason=f"the example needs {package}")
    script = SUPPORT.parents[1] / "examples" / f"{example}.py"
    pack = tmp_path / "digits.safetensors"
    run = torchrun(script, "--steps", 20, "--images", 100, "--out", pack, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    first, last = re.search(r"2 processes, 20 steps: loss (\S+) -> (\S+)", run.stdout).groups()
    assert float(last) < float(first)
    assert pm.inspect(pack).manifest.method == "affine-full"
