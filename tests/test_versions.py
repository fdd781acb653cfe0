"""The ranges of torch and torchvision: what is declared, what is pinned, what was tried."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["vision"]]
RANGES = {need.name: need.specifier for need in map(Requirement, NEEDED)}
PINNED = (ROOT / "constraints.txt").read_text()
PAIRS = re.findall(r"^\| (\d[\d.]*) \| (\d[\d.]*) \|", (ROOT / "docs/faq.md").read_text(), re.M)
TRIED = dict(zip(("torch", "torchvision"), zip(*PAIRS, strict=True), strict=True))


@pytest.mark.parametrize("package", TRIED)
def test_the_declared_range_is_what_was_tried(package):
    tried, allowed = sorted(map(Version, TRIED[package])), RANGES[package]
    assert all(version in allowed for version in tried)
    assert Version(f"{tried[0].major}.{tried[0].minor - 1}.9") not in allowed
    assert Version(f"{tried[-1].major}.{tried[-1].minor + 1}") not in allowed


def test_the_pinned_pair_is_one_that_was_tried():
    pins = dict(re.findall(r"^(torch|torchvision)==(.*)$", PINNED, re.M))
    assert (pins["torch"], pins["torchvision"]) in PAIRS
