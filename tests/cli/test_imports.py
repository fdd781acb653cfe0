"""What a command that only looks at things imports: little, so that it answers at once."""

import json
import subprocess
import sys

import pytest
import torch

import polymask as pm
from polymask.cli.parser import VERBS

MODULES = """
import json, sys
from polymask.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as stopped:
    code = stopped.code
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
sys.exit(code)
"""
HEAVY = {"torch", "numpy", "safetensors", "PIL", "matplotlib", "ray", "fastapi", "onnx"}


def modules_of(*words):
    """The names of all modules that a command imports, and what it printed."""
    run = subprocess.run([sys.executable, "-c", MODULES, *map(str, words)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stderr.splitlines()[-1])), run.stdout


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    path = tmp_path_factory.mktemp("library") / "a.safetensors"
    base = pm.load_base(torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3)))
    pm.new_domain(base, "affine-full").save(path)
    return path


def test_show_imports_nothing_heavy_and_no_other_verb(pack):
    modules, printed = modules_of("show", pack)
    assert "affine-full" in printed
    assert not modules & HEAVY
    others = {f"polymask.cli.{module}" for module in VERBS.data.values() if module != "parser"}
    assert modules & others == {"polymask.cli.packs"}
    # What tyro needs only for types that our verbs need not have, and it is most of the time.
    assert not modules & {"typeguard", "asyncio", "unittest"}


def test_json_needs_no_rich_table(pack):
    modules, printed = modules_of("show", pack, "--json")
    assert json.loads(printed)["method"] == "affine-full"
    assert not modules & {"rich", *HEAVY}


def test_list_and_help_import_nothing_heavy(pack):
    for words in (["list", pack.parent], ["--help"], ["learn", "--help"]):
        modules, _ = modules_of(*words)
        assert not modules & HEAVY, words
