"""Bases in half precision: what learns is in float32, and learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymask as pm
from nets import SPEC, batch, block_net, tiny_net
from polymask.pack.format import read_pack, write_pack
from polymask.train.descent import make_optimiser
from polymask.train.learner import DomainLearner
from polymask.train.predict import evaluate
from polymask.train.recipe import get_recipe
from presets import MERGEABLE, ONE_OF_A_KIND, quickly

HALVES = [torch.float16, torch.bfloat16]
METHODS = quickly(ONE_OF_A_KIND)


def half_base(dtype: torch.dtype, method: str = "affine-full") -> pm.Base:
    net = tiny_net() if method in MERGEABLE else block_net()
    return pm.load_base(net.to(dtype), name="half", input=SPEC)


SGD = {"optimiser": "sgd", "rate": 0.1, "weight_rate": 0.01}


def learner_of(base: pm.Base, method: str, changes=None, **options) -> DomainLearner:
    """A domain with the optimisers that training by a recipe gives it; the head's is SGD."""
    torch.manual_seed(0)
    domain = pm.new_domain(base, method, ["a", "b", "c"], **options)
    rates = {"rate": 1e-2, "weight_rate": 1e-3, "head_rate": 0.1, "head_optimiser": "sgd"}
    recipe = get_recipe("quick", warmup=0, epochs=2, **rates | (changes or {}))
    return DomainLearner(base, domain, recipe)


def losses(learner: DomainLearner, steps: int) -> list[float]:
    images, labels = batch(24)
    learner.begin_epoch()
    # The first epoch may be the head's alone, and in the last one the rates fall.
    return [learner.step(images, labels, 0.5).loss for _ in range(steps)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("method", "changes"), [("affine-full", {}), ("finetune", SGD), ("bn-only", SGD)])
def test_a_domain_learns_on_a_base_in_half_precision(method, changes, dtype):
    base = half_base(dtype)
    learner = learner_of(base, method, changes)
    head = learner.domain.head.weight.detach().clone()
    found = losses(learner, 100)
    assert np.mean(found[-5:]) < 0.5 * found[0]  # ends below a tenth, as in float32
    assert (learner.domain.head.weight - head).abs().mean() > 0.01
    base.verify()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_in_float32_on_a_base_in_half_precision(method, dtype):
    base = half_base(dtype, method)
    learner = learner_of(base, method)
    assert {p.dtype for p in learner.domain.parameters()} == {torch.float32}
    before = [p.detach().clone() for p in learner.domain.parameters() if p.requires_grad]
    assert all(np.isfinite(loss) for loss in losses(learner, 3))
    after = [p for p in learner.domain.parameters() if p.requires_grad]
    moved = [not torch.equal(a, b) for a, b in zip(after, before, strict=True)]
    assert sum(moved) > 0.5 * len(moved)
    assert {t.dtype for n, t in learner.domain.weights(base).items() if n in base.sites} <= {dtype}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("method", METHODS)
def test_a_pack_of_a_base_in_half_precision_says_the_same(method, dtype, tmp_path):
    base = half_base(dtype, method)
    learner = learner_of(base, method)
    losses(learner, 3)
    domain, images = learner.domain.eval(), batch()[0]
    domain.save(tmp_path / "d.safetensors")
    loaded = pm.load_domain(tmp_path / "d.safetensors", base)
    with torch.no_grad():
        expected = domain(base, images)
        assert torch.equal(loaded(base, images), expected)
    assert expected.dtype == torch.float32
    model = pm.MultiDomainModel(base)
    model.add("d", domain)
    assert torch.equal(model(images, domain="d"), expected)
    if method in MERGEABLE:
        with torch.no_grad():
            assert torch.equal(loaded.merged(base)(images.to(dtype)), expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("norms", ["own", "affine", "stats"])
def test_every_policy_of_norms_runs_in_half_precision(norms, dtype):
    base = half_base(dtype)
    learner = learner_of(base, "affine-full", norms=norms)
    start = dict(learner.domain.named_buffers())
    before = {name: tensor.clone() for name, tensor in start.items()}
    losses(learner, 2)
    kept = {n: t for n, t in start.items() if "running" in n}
    assert bool(kept) == (norms in ("own", "stats"))
    assert all(t.dtype == torch.float32 for t in kept.values())
    assert all(not torch.equal(tensor, before[name]) for name, tensor in kept.items())
    learner.domain.reestimate_norms(base, [batch()[0]])
    with torch.no_grad():
        assert torch.isfinite(learner.domain.eval()(base, batch()[0])).all()
    base.verify()


class OtherNorms(nn.Module):
    """Norms without statistics, and one that computes in the type of its own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.group = nn.GroupNorm(2, 8)
        self.instance = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.layer = nn.LayerNorm(8)
        self.scale = ScaleNorm()
        self.hidden = nn.Linear(8, 6)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = F.relu(self.instance(self.group(self.conv(x)))).mean((2, 3))
        return self.fc(self.hidden(self.scale(self.layer(x))))


class ScaleNorm(nn.Module):
    """A norm by hand, with a statistic of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("size", torch.ones(8))

    def forward(self, x):
        return x / self.size * self.weight


@pytest.mark.parametrize("dtype", HALVES)
def test_norms_of_every_kind_learn_in_float32_and_run_in_half_precision(dtype):
    torch.manual_seed(0)
    base = pm.load_base(OtherNorms().to(dtype), name="norms", input=SPEC)
    assert set(base.norms) == {"group", "instance", "layer", "scale"}
    assert not base.trains_channels_last  # the group norm's gradient would crash
    learner = learner_of(base, "bn-only")
    found = losses(learner, 60)
    assert {p.dtype for p in learner.domain.parameters()} == {torch.float32}
    assert np.mean(found[-5:]) < 0.7 * found[0]
    with torch.no_grad(), learner.domain.in_mode(training=False):
        expected = learner.domain(base, batch()[0])
        assert torch.equal(learner.domain.merged(base)(batch()[0].to(dtype)), expected)


def test_norms_and_head_of_a_float64_base_are_float64():
    base = half_base(torch.float64)
    learner = learner_of(base, "finetune")
    assert {p.dtype for p in learner.domain.parameters()} == {torch.float64}
    assert type(learner.domain.head) is nn.Linear
    assert all(np.isfinite(loss) for loss in losses(learner, 2))


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_an_optimiser_moves_parameters_of_any_type(kind, dtype):
    parameter = nn.Parameter(torch.ones(64, dtype=dtype))
    optimiser = make_optimiser([{"params": [parameter]}], kind, 0.1, 0.9)
    parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    assert (parameter < 0.95).all()
    assert optimiser.defaults["fused"] == (dtype.itemsize >= 4)


def test_a_pack_that_kept_halves_still_loads(tmp_path):
    base = half_base(torch.float16)
    domain = learner_of(base, "finetune").domain.eval()
    domain.save(tmp_path / "new.safetensors")
    manifest, tensors = read_pack(tmp_path / "new.safetensors")
    halves = {name: t.astype(np.float16) for name, t in tensors.items()}
    write_pack(tmp_path / "old.safetensors", replace(manifest, format=1), halves)
    loaded = pm.load_domain(tmp_path / "old.safetensors", base)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded.head.weight, domain.head.weight.half().float())
    with torch.no_grad():
        difference = loaded(base, batch()[0]) - domain(base, batch()[0])
    assert difference.abs().max() < 0.01


def test_halves_are_refused_on_a_base_in_float32(tmp_path):
    base = half_base(torch.float32)
    pm.new_domain(base, "bn-only", ["a", "b"]).save(tmp_path / "new.safetensors")
    manifest, tensors = read_pack(tmp_path / "new.safetensors")
    halves = {name: t.astype(np.float16) for name, t in tensors.items()}
    write_pack(tmp_path / "old.safetensors", replace(manifest, format=1), halves)
    with pytest.raises(pm.PackError, match=r"has type float16, not torch\.float32"):
        pm.load_domain(tmp_path / "old.safetensors", base)


class OneBatch:
    def __len__(self):
        return 1

    def batches(self, epoch=0, start=0):
        yield batch(24)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_domain_is_measured_on_images_in_float32(dtype):
    base = half_base(dtype)
    learner = learner_of(base, "bn-only")
    losses(learner, 60)
    assert evaluate(base, learner.domain, OneBatch()) > 60


def test_a_merged_network_of_a_float32_base_has_an_ordinary_head():
    base = half_base(torch.float32)
    merged = pm.new_domain(base, "affine-full", ["a", "b"]).merged(base)
    assert type(merged.fc) is nn.Linear


def test_a_model_that_is_moved_to_another_type_takes_its_images_there():
    base = half_base(torch.float32)
    model = pm.DomainModel(base, pm.new_domain(base, "bn-only", ["a", "b"])).double()
    assert model(batch()[0]).dtype == base.dtype == torch.float64
