"""A base's file: it is loaded by its path, and what does not hold is refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import polymask as pm
from nets import tiny_net
from polymask.nets.base_file import KEY, BaseNotes, read_notes, write_base
from polymask.nets.decathlon import wrn28
from polymask.nets.zoo import build

NET = "timm:test_efficientnet"
SPEC = pm.InputSpec((3, 32, 32), crop=0.9)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("bases") / "digits.safetensors"
    net, _ = build(NET, pretrained=False, classes=10)
    write_base(path, net, BaseNotes(NET, list("0123456789"), SPEC.to_json()))
    return path


def test_a_base_is_loaded_as_the_weights_of_its_network_too(file):
    base = pm.load_base(NET, weights=file)
    assert (base.name, base.input) == (NET, SPEC)
    assert base.fingerprint == pm.load_base(file).fingerprint
    assert base.head.out_features == 10


def test_the_structure_alone_needs_no_weights(file):
    base = pm.load_base(file, pretrained=False, device="meta")
    assert base.head.out_features == 10
    assert pm.account(base, "affine-full").base == NET


def test_a_domain_learned_on_a_base_file_names_the_network_and_fits_it_alone(file, tmp_path):
    base = pm.load_base(file)
    domain = pm.new_domain(base, "affine-full", ["a", "b"])
    domain.save(tmp_path / "d.safetensors")
    assert pm.inspect(tmp_path / "d.safetensors").manifest.base == NET
    pm.load_domain(tmp_path / "d.safetensors", pm.load_base(file))
    stranger = pm.load_base(NET, pretrained=False)
    with pytest.raises(pm.PackError, match="load the base that it was trained on"):
        pm.load_domain(tmp_path / "d.safetensors", stranger)


def test_any_number_of_classes_goes_into_a_decathlon_network(tmp_path):
    path = tmp_path / "w.safetensors"
    net = wrn28(7)
    spec = pm.InputSpec((3, 48, 48), crop=48 / 54)
    write_base(path, net, BaseNotes("decathlon-wrn28", list("abcdefg"), spec.to_json()))
    by_path, by_name = pm.load_base(path), pm.load_base("decathlon-wrn28", weights=path)
    assert by_path.fingerprint == by_name.fingerprint
    assert by_path.input == by_name.input == spec
    assert by_path.head.out_features == 7
    assert all(t.dtype == torch.float32 for n, t in load_file(path).items() if "num_b" not in n)


def test_a_file_that_is_no_base_is_refused_with_a_remedy(file, tmp_path):
    with pytest.raises(pm.BaseError, match=r"no base at nothing\.safetensors"):
        pm.load_base("nothing.safetensors")
    bare = tmp_path / "bare.safetensors"
    save_file({"w": torch.zeros(1)}, bare)
    with pytest.raises(pm.BaseError, match="does not say which network it is of"):
        pm.load_base(bare)
    (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    with pytest.raises(pm.BaseError, match="not an intact safetensors file"):
        pm.load_base(tmp_path / "x.safetensors")
    pm.new_domain(pm.load_base(file), "affine-full").save(tmp_path / "d.safetensors")
    with pytest.raises(pm.BaseError, match="is the pack of a domain, not a base"):
        pm.load_base(tmp_path / "d.safetensors")
    with pytest.raises(pm.BaseError, match="has its own weights"):
        pm.load_base(file, weights=file)
    with pytest.raises(pm.BaseError, match=f"holds {NET}, not timm:test_resnet"):
        pm.load_base("timm:test_resnet", weights=file)
    with pytest.raises(pm.BaseError, match=r"cannot be a base's file; .* ending .safetensors"):
        write_base(tmp_path / "b.pth", tiny_net(), read_notes(file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"net": "resnet26"}, "base 'resnet26' is not known"),
        ({"net": "timm:test_resnet"}, "does not fit timm:test_resnet: it lacks"),
        ({"format": 2}, "has base format 2, .* reads format 1"),
        ({"input": {"shape": [3, 0, 4]}}, "input in its notes: input shape"),
        ({"input": {"size": 3}}, "input in its notes: .*size"),
        ({"classes": []}, "classes in its notes must be names"),
        ({"classes": "ab"}, "classes in its notes must be a list"),
        ({"extra": 1}, "lack or do not know 'extra'"),
        ({"sha256": "0" * 64}, "is damaged: its sha256 is not the one"),
    ],
)
def test_notes_that_do_not_hold_are_refused(file, tmp_path, change, message):
    with safe_open(file, "pt") as opened:
        notes = json.loads(opened.metadata()[KEY])
    path = tmp_path / "b.safetensors"
    save_file(load_file(file), path, {KEY: json.dumps(notes | change)})
    with pytest.raises(pm.BaseError, match=message):
        pm.load_base(path)


def test_notes_that_are_not_json_are_refused(file, tmp_path):
    path = tmp_path / "b.safetensors"
    for text in ("{", "[]"):
        save_file(load_file(file), path, {KEY: text})
        with pytest.raises(pm.BaseError, match="is damaged: its note is not"):
            pm.load_base(path)


@pytest.mark.parametrize("padding", range(0, 64, 8))
def test_a_base_does_not_change_with_the_file_that_it_was_read_from(padding, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(build(NET, pretrained=False)[0].state_dict(), path, {"padding": "x" * padding})
    base = pm.load_base(NET, weights=path)
    with path.open("r+b") as file:  # over the bytes that are there: a mapping would see them
        file.seek(path.stat().st_size // 2)
        file.write(bytes(path.stat().st_size // 2))
        file.truncate(path.stat().st_size // 4)
    base.verify()
