"""The base as one file that nodes map into memory."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import polymask as pm
from polymask.benchmarks.jobs import BaseName, load_base_of
from polymask.benchmarks.ray import copy_base
from polymask.nets.base_file import ALIGNMENT, BaseNotes, write_aligned, write_base
from polymask.nets.zoo import build


def test_a_named_base_is_the_same_from_its_copy(tmp_path):
    original = BaseName("efficientnet-lite0")
    copy = copy_base(original, tmp_path)
    assert copy.name == original.name
    assert copy.weights.parent == tmp_path
    assert copy.weights.stat().st_mode & 0o222 == 0  # it is only read
    before, after = pm.load_base("efficientnet-lite0"), load_base_of(copy)
    assert (before.name, before.input) == (after.name, after.input)
    assert before.fingerprint == after.fingerprint
    assert copy_base(original, tmp_path) == copy
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what is mapped")
def test_the_weights_of_a_copy_are_pages_of_the_file(tmp_path):
    copy = copy_base(BaseName("efficientnet-lite0"), tmp_path)
    base = pm.load_base(copy.name, weights=copy.weights)
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if line.endswith(copy.weights.name)]
    ranges = [(int(start, 16), int(end, 16)) for start, end in ends]
    tensors = [base.tensor(site) for site in base.sites]
    mapped = [any(a <= t.data_ptr() < b for a, b in ranges) for t in tensors]
    weights = sum(t.numel() for t in tensors)
    assert sum(t.numel() for t, m in zip(tensors, mapped, strict=True) if m) > 0.99 * weights
    assert all(t.data_ptr() % ALIGNMENT == 0 for t in tensors)


def test_a_base_of_a_file_keeps_what_its_file_says(tmp_path):
    net, spec = build("decathlon-resnet26", pretrained=False, classes=3)
    notes = BaseNotes("decathlon-resnet26", ["a", "b", "c"], spec.to_json())
    write_base(tmp_path / "mine.safetensors", net, notes)
    copy = copy_base(BaseName(str(tmp_path / "mine.safetensors")), tmp_path / "shared")
    assert copy.weights is None
    before, after = pm.load_base(tmp_path / "mine.safetensors"), pm.load_base(copy.name)
    assert before.fingerprint == after.fingerprint
    assert before.name == after.name


def test_an_aligned_file_is_safetensors_to_everybody(tmp_path):
    tensors = {
        "odd": torch.randn(7),
        "weight": torch.randn(16, 4),
        "counter": torch.tensor(3),
        "bytes": torch.arange(64, dtype=torch.uint8),
    }
    write_aligned(tmp_path / "x.safetensors", tensors, {"note": "yes"})
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert found["weight"].data_ptr() % ALIGNMENT == 0
    assert found["bytes"].data_ptr() % ALIGNMENT == 0


def test_training_a_network_from_a_file_does_not_write_to_the_file(tmp_path):
    net, _ = build("decathlon-resnet26", pretrained=False, classes=3)
    state = {name: t.clone() for name, t in net.state_dict().items()}
    write_aligned(tmp_path / "w.safetensors", state, {})
    before = (tmp_path / "w.safetensors").read_bytes()
    loaded, _ = build("decathlon-resnet26", weights=tmp_path / "w.safetensors")
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(1.0)
    assert (tmp_path / "w.safetensors").read_bytes() == before


def test_tied_weights_of_a_module_stay_one(tmp_path):
    from polymask.nets.zoo import _fill

    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    net[1].weight = net[0].weight
    save_file({n: t.clone() for n, t in net.state_dict().items()}, tmp_path / "t.safetensors")
    _fill(net, load_file(tmp_path / "t.safetensors"), "tied", "t.safetensors")
    assert net[1].weight is net[0].weight
