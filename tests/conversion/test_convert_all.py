"""A library from many checkpoints: what fits is converted, what does not is listed, and a second call goes on."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import polymask as pm
from image_folders import draw_image, make_folder
from nets import batch, tiny_base, tiny_net
from polymask.cli import main
from polymask.conversion.convert import convert
from polymask.conversion.finetuned import ConvertError
from polymask.conversion.library import Checkpoint, ConvertOptions, convert_all

NAMES = ("ash", "birch", "cedar")


@pytest.fixture
def base():
    return tiny_base()


@pytest.fixture
def checkpoints(tmp_path):
    """Three networks that were moved from the base, with heads of two to four classes."""
    made = {}
    for i, name in enumerate(NAMES):
        net = tiny_net()
        torch.manual_seed(i)
        net.fc = nn.Linear(12, 2 + i)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        path = tmp_path / f"{name}.safetensors"
        save_file({n: t.contiguous() for n, t in net.state_dict().items()}, path)
        made[name] = Checkpoint(path)
    return made


@pytest.mark.parametrize("method", ["bitdelta", "bitdelta-row", "tall-mask", "emr"])
def test_many_checkpoints_become_one_library(base, checkpoints, tmp_path, method):
    found = list(convert_all(base, checkpoints, tmp_path / "library", method=method))
    assert [one.name for one in found] == list(NAMES)
    assert all(one.problem is None and one.pack_bytes < one.checkpoint_bytes for one in found)
    model = pm.MultiDomainModel(base, library=tmp_path / "library", strict=True)
    images, _ = batch()
    assert [model(images, domain=name).shape[1] for name in NAMES] == [2, 3, 4]
    assert len(list((tmp_path / "library").glob("*.shared"))) == (method in ("tall-mask", "emr"))
    base.verify()


def test_the_masks_of_a_library_are_those_of_domains_that_settle_together(base, checkpoints, tmp_path):
    list(convert_all(base, checkpoints, tmp_path / "library", method="emr"))
    method = pm.create_method("emr")
    learned = []
    for i, checkpoint in enumerate(checkpoints.values()):
        domain = pm.new_domain(base, method.first_stage(), [f"class {j}" for j in range(2 + i)])
        state = pm.nets.base_file.read_checkpoint(checkpoint.path)
        with torch.no_grad():
            for name, transform in domain.named_transforms():
                transform.delta.copy_(state[name] - base.tensor(name))
        learned.append(domain)
    for name, settled in zip(NAMES, method.settle(base, learned), strict=True):
        loaded = pm.load_domain(tmp_path / "library" / f"{name}.safetensors", base)
        theirs, ours = loaded.weights(base), settled.weights(base)
        assert all(torch.equal(theirs[site], ours[site]) for site in base.sites)


@pytest.mark.parametrize("method", ["bitdelta", "emr"])
def test_what_does_not_fit_is_listed_and_the_others_go_on(base, checkpoints, tmp_path, method):
    save_file({"nothing": torch.zeros(1)}, checkpoints["birch"].path)
    found = {one.name: one for one in convert_all(base, checkpoints, tmp_path / "library", method=method)}
    assert "does not fit base" in found["birch"].problem
    assert found["birch"].pack is None
    assert found["ash"].problem is None
    assert found["cedar"].problem is None
    assert sorted(pm.MultiDomainModel(base, library=tmp_path / "library").domains) == ["ash", "cedar"]


@pytest.mark.parametrize("method", ["bitdelta", "tall-mask"])
def test_a_second_call_makes_only_what_is_missing(base, checkpoints, tmp_path, method):
    library = tmp_path / "library"
    list(convert_all(base, checkpoints, library, method=method))
    (library / "birch.safetensors").unlink()
    before = {file: file.stat().st_mtime_ns for file in library.iterdir()}
    found = {one.name: one.kept for one in convert_all(base, checkpoints, library, method=method)}
    assert found == {"ash": True, "birch": False, "cedar": True}
    assert all(file.stat().st_mtime_ns == when for file, when in before.items())


def test_a_folder_that_has_changed_is_something_else(base, checkpoints, tmp_path):
    folder, library = make_folder(tmp_path / "photos", train=10), tmp_path / "library"
    one = {"ash": dataclasses.replace(checkpoints["ash"], data=str(folder))}
    how = {"method": "bitdelta", "options": ConvertOptions(steps=1, side=16)}
    assert [found.problem for found in convert_all(base, one, library, **how)] == [None]
    assert [found.kept for found in convert_all(base, one, library, **how)] == [True]
    draw_image(folder / "train" / "class-0" / "new.png", 0, 99)
    (again,) = convert_all(base, one, library, **how)
    assert "made of something else" in again.problem


def test_a_checkpoint_that_is_not_there_is_listed_too(base, checkpoints, tmp_path):
    checkpoints["birch"].path.unlink()
    for method in ("bitdelta", "emr"):
        found = {one.name: one.problem for one in convert_all(base, checkpoints, tmp_path / method, method=method)}
        assert "birch.safetensors" in found["birch"]
        assert found["ash"] is None


def test_a_pack_of_something_else_is_not_replaced(base, checkpoints, tmp_path):
    library = tmp_path / "library"
    list(convert_all(base, checkpoints, library))
    before = (library / "ash.safetensors").read_bytes()
    found = list(convert_all(base, checkpoints, library, method="bitdelta-row"))
    assert all("made of something else" in one.problem for one in found)
    assert (library / "ash.safetensors").read_bytes() == before
    forced = ConvertOptions(force=True)
    assert not any(
        one.problem for one in convert_all(base, checkpoints, library, method="bitdelta-row", options=forced)
    )


def test_shared_methods_want_several_networks_and_others_say_what_there_is(base, checkpoints, tmp_path):
    with pytest.raises(ConvertError, match="convert them together"):
        convert(base, checkpoints["ash"].path, method="emr")
    with pytest.raises(ConvertError, match="tall-mask or emr"):
        list(convert_all(base, checkpoints, tmp_path, method="packnet"))
    with pytest.raises(ConvertError, match="no checkpoint"):
        list(convert_all(base, {}, tmp_path))


def test_folders_of_transformers_give_their_classes(tmp_path, monkeypatch, capsys):
    pm.import_torchvision()  # transformers imports it, which with a CPU-only torch needs help
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
        num_labels=3,
    )
    torch.manual_seed(0)
    net = transformers.ViTForImageClassification(config)
    net.save_pretrained(tmp_path / "base")
    for i, name in enumerate(("cats", "dogs")):
        net.config.id2label = {j: f"{name} {j}" for j in range(2 + i)}
        net.classifier = nn.Linear(24, 2 + i)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        net.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    words = ["convert", "cats", "dogs", "--base", "transformers:base", "--method", "emr", "--json"]
    assert main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["problem"] for row in printed["packs"]] == [None, None]
    base = pm.load_base("transformers:base")
    assert base.input.shape == (3, 32, 32)
    assert pm.load_domain("library/dogs.safetensors", base).classes == ["dogs 0", "dogs 1", "dogs 2"]


def test_the_table_says_what_was_converted_and_what_was_not(base, checkpoints, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("polymask.cli.convert.ConvertVerb.open_base", lambda self, name: base)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elm.safetensors").write_bytes(b"nothing")
    assert (
        main(["convert", *(f"{n}.safetensors" for n in NAMES), "elm.safetensors", "--base", "x", "--method", "emr"])
        == 1
    )
    text = capsys.readouterr().out
    assert "3 of 4 converted" in text
    assert "once for all of them" in text
    assert "not converted: elm" in text
    for words, message in [
        (["ash.safetensors", "birch.safetensors", "--name", "x"], "write NAME=FILE"),
        (["a=ash.safetensors", "a=birch.safetensors"], "would both be called a"),
        (["ash.safetensors", "none.safetensors"], "no checkpoint at none.safetensors"),
        (["ash.safetensors", "birch.safetensors", "--data", "pictures"], "must hold {name}"),
        (["ash.safetensors", "--method", "emr"], "give more, or take bitdelta"),
    ]:
        assert main(["convert", "--base", "x", *words]) == 1
        assert message in capsys.readouterr().err
