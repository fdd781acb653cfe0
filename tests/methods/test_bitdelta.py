"""BitDelta: fine-tune, take the nearest signs and sizes, refine."""

import dataclasses
import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import polymask as pm
from nets import SPEC, logits, tiny_base, trained
from polymask.core.accounting import component_bits
from polymask.core.bits import Bits
from polymask.core.survey import Site
from polymask.errors import InterruptedTraining
from polymask.methods.affine.formula import affine
from polymask.methods.baselines import FreeWeights
from polymask.methods.bitdelta import GAIN, BitDelta, SignsTransform, nearest
from polymask.pack.format import read_pack, write_pack
from polymask.train.fit import Listener, fit
from polymask.train.recipe import Recipe
from short_training import TRAIN, VAL, StopAt, same

CLASSES = ["a", "b", "c"]
RECIPE = Recipe(epochs=3, rate=3e-3, weight_rate=3e-3, head_rate=1e-2, drops=(), batch_size=8)
changes = st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=40)


def signs_of(shape=(4, 3, 3, 3), dtype=torch.float32, seed=0):
    """The signs of a random change of one site, and its W."""
    torch.manual_seed(seed)
    conv = nn.Conv2d(shape[1], shape[0], shape[2], padding=1, bias=False).to(dtype)
    base = pm.load_base(conv, input=pm.InputSpec((shape[1], 6, 6), (0.5,) * 3, (0.5,) * 3))
    free = FreeWeights(base.sites["weight"])
    nn.init.normal_(free.delta, std=0.1)
    transform = BitDelta().transform(base.sites["weight"])
    transform.take(free)
    return transform, base.tensor("weight"), free.delta.detach()


def refined(base, **changes):
    """A domain that is about to refine, after a little fine-tuning."""
    torch.manual_seed(0)
    domain = pm.new_domain(base, "bitdelta", CLASSES)
    for parameter in domain.transforms.parameters():
        nn.init.normal_(parameter, std=0.05)
    return domain.method.next_stage(base, domain, lambda: iter(())), domain


@given(changes)
def test_alpha_is_the_least_squares_scale_of_its_signs(values):
    delta = torch.tensor(values, dtype=torch.float64)
    mask, alpha = nearest(delta)
    signs = 2 * mask.double() - 1
    (solved,), *_ = np.linalg.lstsq(signs[:, None].numpy(), delta.numpy(), rcond=None)
    assert alpha.item() == pytest.approx(solved, abs=1e-12)
    assert alpha.item() == pytest.approx(delta.abs().mean().item(), abs=1e-12)


@settings(max_examples=50)
@given(changes, st.integers(0, 2**31))
def test_no_other_signs_and_scale_are_nearer(values, seed):
    delta = torch.tensor(values, dtype=torch.float64)
    mask, alpha = nearest(delta)
    least = (delta - alpha * (2 * mask.double() - 1)).square().sum()
    for scale in torch.linspace(-4, 4, 81, dtype=torch.float64):
        assert least <= (delta - scale * (2 * mask.double() - 1)).square().sum() + 1e-12
    other = torch.rand(len(delta), generator=torch.Generator().manual_seed(seed)) > 0.5
    signs = 2 * other.double() - 1
    best = (delta * signs).mean()
    assert least <= (delta - best * signs).square().sum() + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_affine_form_to_the_bit(dtype):
    transform, W, _ = signs_of(dtype=dtype)
    alpha, M = transform.size().detach(), transform.mask()
    assert 0 < M.double().mean() < 1
    assert torch.equal(transform.weight(W), affine(W, M, 1.0, -alpha, 2 * alpha, 0.0))


def test_the_gradient_of_theta_is_that_of_the_formula():
    transform, W, _ = signs_of(dtype=torch.float64)
    G = torch.randn(W.shape, dtype=torch.float64)
    (transform.weight(W) * G).sum().backward()
    signs = 2 * transform.mask().double() - 1
    expected = GAIN * transform.alpha * (G * signs).sum()
    torch.testing.assert_close(transform.theta.grad, expected.reshape(1))


def test_a_fresh_domain_is_the_base_and_learns_whole_weights_first():
    base = tiny_base()
    fresh = pm.new_domain(base, "bitdelta", CLASSES)
    assert all(torch.equal(t, base.tensor(n)) for n, t in fresh.weights(base).items())
    assert all(isinstance(t, FreeWeights) for _, t in fresh.named_transforms())
    assert fresh.param_groups()["weights"]
    assert not fresh.param_groups()["transforms"]


def test_the_second_stage_has_the_signs_and_mean_sizes_of_what_was_fine_tuned():
    base = tiny_base()
    following, tuned = refined(base)
    before = dict(tuned.named_transforms())
    for name, transform in following.named_transforms():
        delta = before[name].delta.detach()
        assert isinstance(transform, SignsTransform)
        assert torch.equal(transform.mask(), delta > 0)
        torch.testing.assert_close(transform.size().detach()[0], delta.abs().mean())
        if base.sites[name].has_bias:
            assert torch.equal(transform.delta_bias.detach(), before[name].delta_bias.detach())
    assert torch.equal(following.head.weight, tuned.head.weight)


def test_both_stages_share_one_budget_and_only_the_first_moves_signs():
    base = tiny_base()
    torch.manual_seed(0)
    domain = pm.new_domain(base, "bitdelta", CLASSES)
    seen = []

    class Watching(Listener):
        def epoch(self, record, seconds):
            seen.append(domain.method.stage)

    history = fit(base, domain, TRAIN, VAL, RECIPE, listener=Watching())
    assert len(history) == RECIPE.epochs
    assert seen == ["weights", "weights", "signs"]
    assert domain.method.stage == "signs"
    assert not any(p.requires_grad for p in domain.parameters())
    base.verify()


def test_refining_moves_sizes_biases_norms_and_head_but_no_sign():
    base = tiny_base()
    domain, _ = refined(base)
    before = {name: t.clone() for name, t in domain.state_dict().items()}
    recipe = Recipe(epochs=1, rate=1e-3, head_rate=1e-2, drops=(), batch_size=8, selection="last")
    fit(base, domain, TRAIN, None, recipe)
    transforms = dict(domain.named_transforms())
    for name, transform in transforms.items():
        key = f"transforms.:{name.replace('.', '/')}"
        assert torch.equal(transform.words, before[f"{key}.words"])
        assert not torch.equal(transform.alpha, before[f"{key}.alpha"])
    assert not torch.equal(domain.head.weight, before["head.weight"])


@pytest.mark.parametrize("place", [(0, 2), (1, 3), (2, 2)])
def test_a_run_that_is_stopped_in_either_stage_resumes_to_the_bit(tmp_path, place):
    base = tiny_base()

    def fresh():
        torch.manual_seed(0)
        return pm.new_domain(base, "bitdelta", CLASSES)

    whole = fresh()
    expected = fit(base, whole, TRAIN, VAL, RECIPE)
    checkpoint = tmp_path / "c.safetensors"
    with pytest.raises(InterruptedTraining):
        fit(base, fresh(), TRAIN, VAL, RECIPE, checkpoint=checkpoint,
            listener=StopAt(*place, signal.SIGTERM))  # fmt: skip
    resumed = fresh()
    assert fit(base, resumed, TRAIN, VAL, RECIPE, checkpoint=checkpoint, resume=True) == expected
    assert same(whole, resumed)


def test_the_stored_form_holds_one_bit_per_weight_one_scale_and_the_change_of_the_bias():
    base = tiny_base()
    domain, _ = refined(base)
    frozen = domain.eval().frozen()
    for name, transform in frozen.named_transforms():
        stored = transform.stored()
        assert transform.theta is None
        assert isinstance(stored["mask"], Bits)
        assert stored["mask"].numel == base.tensor(name).numel()
        assert stored["alpha"].shape == (1,)
        assert ("bias" in stored) == base.sites[name].has_bias
    bits = component_bits(frozen)
    assert bits["mask"] == sum(site.numel for site in base.sites.values())
    assert bits["scalars"] == 32 * len(base.sites)
    assert bits["bias"] == 32 * sum(s.channels for s in base.sites.values() if s.has_bias)
    assert torch.equal(logits(base, frozen), logits(base, domain))


def test_a_domain_takes_about_one_bit_per_weight_of_a_real_network():
    base = pm.load_base("torchvision:resnet50", pretrained=False, device="meta")
    counted = pm.account(base, "bitdelta")
    assert counted.components["mask"] == counted.masked_weights == 23_454_912
    assert counted.components["scalars"] == 32 * 53
    assert 1.03 < counted.params_paper < 1.04
    assert 1.0 < counted.bits_per_weight < 1.15


def test_half_precision_weights_stay_half_precision():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).bfloat16()
    base = pm.load_base(net, input=SPEC)
    domain = pm.new_domain(base, "bitdelta", None)
    for stage in (domain, domain.method.next_stage(base, domain, lambda: iter(()))):
        weights = stage.weights(base)
        assert {t.dtype for t in weights.values()} == {torch.bfloat16}


def test_a_pack_of_the_version_that_learned_signs_still_loads(tmp_path):
    base = tiny_base()
    domain, _ = refined(base)
    frozen = domain.frozen()
    frozen.save(tmp_path / "d.safetensors")

    manifest, tensors = read_pack(tmp_path / "d.safetensors")
    options = {n: v for n, v in manifest.options.items() if n not in ("stage", "tuning")}
    old = dataclasses.replace(manifest, options=options | {"scores": [1e-4, 2e-4]})
    write_pack(tmp_path / "old.safetensors", old, tensors)
    loaded = pm.load_domain(tmp_path / "old.safetensors", base)
    assert torch.equal(logits(base, loaded), logits(base, frozen))


def test_both_forms_give_the_same_outputs():
    base = tiny_base()
    domain = trained(base, "bitdelta")
    assert torch.equal(logits(base, domain.frozen()), logits(base, domain))


@pytest.mark.parametrize(("option", "value"), [("tuning", 1.5), ("stage", "sizes"), ("per", "channel")])
def test_senseless_options_are_refused_by_name(option, value):
    with pytest.raises(pm.MethodError, match=option):
        pm.create_method("bitdelta", **{option: value})


LAYERS = {
    "linear": nn.Linear(6, 4),
    "conv2d": nn.Conv2d(6, 4, 3),
    "grouped": nn.Conv2d(6, 4, 3, groups=2),
    "depthwise": nn.Conv2d(6, 6, 3, groups=6),
    "conv_transpose2d": nn.ConvTranspose2d(6, 4, 3, groups=2),
}


def channels_of(layer: nn.Module, place: tuple[int, ...]) -> dict[str, int]:
    """The output and the input channel that one weight of a layer connects."""
    first, second = place[:2]
    groups = getattr(layer, "groups", 1)
    own_first, own_second = layer.weight.shape[0] // groups, layer.weight.shape[1]
    across = first // own_first * own_second + second  # the second axis counts within a group
    return {"row": across, "column": first} if "Transpose" in type(layer).__name__ else {"row": first, "column": across}


@pytest.mark.parametrize("per", ["row", "column"])
@pytest.mark.parametrize("kind", LAYERS)
def test_every_row_or_column_has_the_mean_size_of_its_own_changes(kind, per):
    layer = LAYERS[kind]
    W = layer.weight.detach().double()
    name = kind if kind in ("linear", "conv_transpose2d") else "conv2d"
    site = Site("weight", tuple(W.shape), name, getattr(layer, "groups", 1), "bias", False, None, False, W.dtype)
    free = FreeWeights(site)
    nn.init.normal_(free.delta)
    transform = BitDelta(per=per).transform(site)
    transform.take(free)

    together: dict[int, list[float]] = {}
    for place in np.ndindex(*W.shape):
        together.setdefault(channels_of(layer, place)[per], []).append(abs(free.delta[place].item()))
    assert transform.alpha.tolist() == pytest.approx([np.mean(together[i]) for i in range(len(together))])
    moved = (transform.weight(W) - W).detach()
    for place in np.ndindex(*W.shape):
        size = np.mean(together[channels_of(layer, place)[per]])
        assert moved[place].item() == pytest.approx(size * np.sign(free.delta[place].item()))


def test_more_sizes_are_never_farther_from_the_fine_tuned_weights():
    torch.manual_seed(0)
    site = Site("weight", (6, 4, 3, 3), "conv2d", 1, "bias", False, None, False, torch.float64)
    free = FreeWeights(site)
    nn.init.normal_(free.delta)
    with torch.no_grad():
        free.delta *= torch.rand(6, 4, 1, 1)
    missed = {}
    for per in ("layer", "row", "column"):
        transform = BitDelta(per=per).transform(site)
        transform.take(free)
        missed[per] = (transform.weight(torch.zeros(site.shape).double()) - free.delta).norm().item()
    assert missed["row"] < missed["layer"]
    assert missed["column"] < missed["layer"]


@pytest.mark.parametrize(("method", "sizes"), [("bitdelta", 1), ("bitdelta-row", 64), ("bitdelta-column", 3)])
def test_a_domain_takes_a_bit_for_each_weight_and_32_for_each_size(method, sizes):
    base = pm.load_base(nn.Conv2d(3, 64, 7, bias=False), input=SPEC, classifier=None)
    bits = pm.account(base, method).components
    assert (bits["mask"], bits["scalars"]) == (64 * 3 * 49, 32 * sizes)
