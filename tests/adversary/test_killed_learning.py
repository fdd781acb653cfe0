"""A learning process that is killed before any change to the disk goes on to the same bytes, by every method."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import polymask as pm
from presets import ONE_OF_A_KIND

SUPPORT = Path(__file__).parents[1] / "support"
PROGRAM = SUPPORT / "killed_learning.py"


def in_stages(name: str) -> bool:
    """Whether a method learns in more than one go: in stages, after others, with others, or on the base's images."""
    method = pm.create_method(name)
    changes = type(method).next_stage is not pm.Method.next_stage or len(method.stages) > 1
    return changes or method.base_stage or not method.alone


def learns_one(name: str) -> bool:
    """Whether the command takes a method: for one domain, without the base's own images."""
    method = pm.create_method(name)
    return not (method.needs_own or method.needs_others)


STAGED = sorted(name for name in ONE_OF_A_KIND if in_stages(name))
BY_COMMAND = ["affine-full", "ba2", *(name for name in STAGED if learns_one(name))]


def killed(how: str, method: str, folder: Path, *places: object) -> dict:
    search = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, PROGRAM, how, method, folder, *map(str, places)]
    run = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": search})
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["tried"] > 0
    return found["wrong"]


def test_methods_with_stages_are_found():
    assert {"bitdelta", "covnorm", "packnet", "progressive", "mtan", "pa-svd"} <= set(STAGED)


@pytest.mark.parametrize(("how", "method"), [("learn", "bitdelta"), ("fit_all", "packnet")])
def test_a_run_that_is_killed_here_and_there_goes_on_to_the_same_bytes(how, method, tmp_path):
    assert killed(how, method, tmp_path, 0.4, 0.8) == {}


@pytest.mark.slow
@pytest.mark.parametrize("method", BY_COMMAND)
def test_the_command_that_is_killed_before_any_event_goes_on_to_the_same_bytes(method, tmp_path):
    assert killed("learn", method, tmp_path, "all") == {}


@pytest.mark.slow
@pytest.mark.parametrize("method", STAGED)
def test_a_sequence_that_is_killed_before_any_event_goes_on_to_the_same_bytes(method, tmp_path):
    assert killed("fit_all", method, tmp_path, "all") == {}
