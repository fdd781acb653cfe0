"""A method that finds next to nothing to adapt in a base is refused, and says what to do."""

import pytest
import torch
from torch import nn

import polymask as pm
from image_folders import make_folder
from nets import SPEC, logits, tiny_base, trained
from polymask.benchmarks.jobs import BaseName
from polymask.benchmarks.planning import Request, make_plan
from polymask.benchmarks.suites import Protocol, find_suite
from polymask.core.method import Method
from polymask.train.recipe import get_recipe

METHODS = {name: pm.create_method(name) for name in pm.list_methods()}
ADAPTERS = [name for name, method in METHODS.items() if "sites" in method.wider]
OTHERS = [name for name, method in METHODS.items() if method.mergeable and not method.wider]


class Layer(nn.Module):
    """An attention layer without attention: four maps of tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        for layer in self.maps:
            y = layer(y).relu()
        return x + y


class Patches(nn.Module):
    """Patches, and layers that know no neighbours: a transformer to a method."""

    def __init__(self, patch: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, patch, patch)
        self.layers = nn.Sequential(*(Layer(8) for _ in range(3)))
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        return self.fc(self.layers(x).mean(1))


class Nothing(Method):
    """A method that was made for other layers."""

    def transform(self, site):
        return None


def patch_base(patch: int = 4) -> pm.Base:
    torch.manual_seed(0)
    return pm.load_base(Patches(patch), name="patches", input=SPEC)


def test_the_adapters_are_those_that_choose_among_sites():
    assert {"series-adapter", "parallel-adapter", "covnorm", "pa-svd"} < set(ADAPTERS)
    assert {"series-adapter-joint", "series-adapter-n"} < set(ADAPTERS)
    assert {"classifier-only", "bn-only", "affine-full", "packnet"} < set(OTHERS)


@pytest.mark.parametrize("patch", [4, 5])  # an even kernel has no centre tap
@pytest.mark.parametrize("method", ADAPTERS)
def test_an_adapter_that_finds_at_most_the_patches_is_refused_with_the_remedy(method, patch):
    base = patch_base(patch)
    message = rf"{method} adapts [01] of 13 sites of base patches.*; make it with sites='all', or"
    with pytest.raises(pm.MethodError, match=message):
        pm.new_domain(base, method, ["a", "b"])
    with pytest.raises(pm.MethodError, match=message):
        pm.account(base, method)
    assert len(dict(pm.new_domain(base, method, ["a"], sites="all").named_transforms())) >= 12


@pytest.mark.parametrize("method", OTHERS)
def test_other_methods_take_such_a_base(method):
    pm.new_domain(patch_base(), method, ["a", "b"])


def test_the_sites_that_were_chosen_count():
    base = tiny_base(include=["plain.weight", "hidden.weight"])
    with pytest.raises(pm.MethodError, match="parallel-adapter adapts 0 of 2 sites of base tiny"):
        pm.new_domain(base, "parallel-adapter", ["a"])
    with pytest.raises(pm.MethodError, match=r"dan adapts 0 of 1 .*make it with always=True, or"):
        pm.new_domain(tiny_base(include=["plain.weight"]), "dan", ["a"])


def test_where_no_option_reaches_more_none_is_named():
    base = tiny_base(include=["plain.weight"])
    with pytest.raises(pm.MethodError, match="head would learn; take a method for layers"):
        pm.new_domain(base, Nothing(name="nothing"), ["a"])


def test_a_pack_that_was_made_before_still_loads(tmp_path, monkeypatch):
    base = patch_base()
    with monkeypatch.context() as before:
        before.setattr("polymask.core.registry.check_reach", lambda domain: None)
        domain = trained(base, "parallel-adapter").eval()
    domain.save(tmp_path / "d.safetensors")
    loaded = pm.load_domain(tmp_path / "d.safetensors", base)
    assert torch.equal(logits(base, loaded), logits(base, domain))


def test_a_benchmark_says_so_before_any_training(tmp_path, monkeypatch):
    make_folder(tmp_path / "data" / "apples")
    monkeypatch.setattr("polymask.benchmarks.planning.load_base", lambda *_, **__: patch_base())
    request = Request(
        suite=find_suite(str(tmp_path / "data"), None),
        base=BaseName("patches"),
        methods=("bn-only", "parallel-adapter"),
        seeds=(0,),
        protocol=Protocol(get_recipe("quick", side=16, epochs=1)),
        out=tmp_path / "out",
    )
    with pytest.raises(pm.MethodError, match="parallel-adapter adapts 0 of 13 sites"):
        make_plan(request)
    assert not (tmp_path / "out").exists()
