"""A method that another package brings, installed as its users would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import polymask as pm
from nets import tiny_base

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "polymask-signflip"
version = "1.0"

[project.entry-points."polymask.methods"]
sign-flip = "signflip:SIGN_FLIP"

[tool.hatch.build.targets.wheel]
packages = ["signflip"]
"""

MODULE = '''
"""W~ = s W, with one learned number s for each output channel."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from polymask import Method, Transform
from torch import nn


@dataclass(frozen=True, kw_only=True)
class SignFlip(Method):
    """A scale for each output channel, from `start` on."""

    start: float = 1.0
    reference: ClassVar[str] = "nowhere"

    def transform(self, site):
        return Scale(self, site)


class Scale(Transform):
    components: ClassVar = {"scale": "scalars"}

    def __init__(self, method, site):
        super().__init__()
        self.view_shape = site.channel_view
        self.scale = nn.Parameter(torch.full(site.channel_shape, method.start, dtype=site.dtype))

    def weight(self, base_weight):
        return (base_weight.view(self.view_shape) * self.scale).view(base_weight.shape)


SIGN_FLIP = SignFlip()
'''

USE = """
import torch, polymask as pm
from nets import tiny_base, trained, logits
base = tiny_base()
domain = trained(base, "sign-flip", start=0.5)
domain.save("d.safetensors")
assert torch.equal(logits(base, pm.load_domain("d.safetensors", base)), logits(base, domain))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment in which the package is installed, by pip, without a network."""
    folder = tmp_path_factory.mktemp("package")
    source, target = folder / "source", folder / "installed"
    (source / "signflip").mkdir(parents=True)
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "signflip" / "__init__.py").write_text(MODULE)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    options = ["--no-build-isolation", "--target", str(target), str(source)]
    subprocess.run([*pip, *options], check=True, timeout=120)
    paths = [
        str(target),
        str(Path(__file__).parents[1] / "support"),
        os.environ.get("PYTHONPATH", ""),
    ]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def test_the_command_line_lists_it(environment):
    command = [sys.executable, "-m", "polymask", "methods", "sign-*", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout)
    assert row["name"] == "sign-flip"
    assert row["reference"] == "nowhere"
    assert 0 < row["bits_per_weight"] < 1


def test_it_learns_and_its_pack_loads_where_it_is_installed_and_is_refused_by_name_elsewhere(environment, tmp_path):
    subprocess.run([sys.executable, "-c", USE], env=environment, cwd=tmp_path, check=True)
    with pytest.raises(pm.PackError, match="sign-flip"):
        pm.load_domain(tmp_path / "d.safetensors", tiny_base())
