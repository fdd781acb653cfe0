"""CovNorm: components, factors, their ranks and their cost."""

import dataclasses
import json
import math
import signal
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import polymask as pm
from nets import SPEC, batch, tiny_base, tiny_net
from polymask.core.accounting import component_bits
from polymask.errors import InterruptedTraining
from polymask.methods.covnorm import Factors, MiniAdapter, adapter_moments, principal
from polymask.methods.series_adapter import Adapter
from polymask.train.fit import Listener, fit
from polymask.train.recipe import Recipe
from short_training import TRAIN, VAL, StopAt, same

CLASSES = ["a", "b", "c"]


def double_base():
    return pm.load_base(tiny_net().double(), name="tiny", input=SPEC)


def batches(dtype=torch.float64):
    return [(images.to(dtype), labels) for images, labels in map(batch, (12, 16, 20))]


def learned(base, dtype=torch.float64, **options):
    """A domain in its stored form with adapters and statistics as after some training."""
    torch.manual_seed(0)
    domain = pm.new_domain(base, "covnorm", CLASSES, start="he", sites="conv", **options).train()
    with torch.no_grad():
        for transform in transforms(domain).values():
            transform.scale.uniform_(0.5, 1.5)
            transform.shift.normal_(0, 0.2)
        for images, _ in batches(dtype) * 10:
            domain(base, images)
    return domain.frozen()


def transforms(domain):
    return dict(domain.named_transforms())


def following(base, domain):
    images = batches(domain.head.weight.dtype)
    return domain.method.next_stage(base, domain, lambda: iter(images))


def inputs_of_adapters(base, domain):
    """BN(y) by site (groups, rows, pixels), from the merged network's own activations."""
    net, seen = domain.merged(base), {}
    adapters = transforms(domain)

    def see(name, module, args):
        W, at = base.tensor(name), base.net.get_submodule(name.removesuffix(".weight"))
        y = F.conv2d(args[0], W, at.bias, at.stride, at.padding, at.dilation, at.groups)
        its = adapters[name]
        x = F.batch_norm(y, its.running_mean, its.running_var, its.scale, its.shift, eps=1e-5)
        seen.setdefault(name, []).append(x.movedim(1, 0).reshape(its.groups, its.rows, -1))

    for name in adapters:
        layer = net.get_submodule(name.removesuffix(".weight"))
        layer.register_forward_pre_hook(lambda m, args, name=name: see(name, m, args))
    with torch.no_grad():
        for images, _ in batches():
            net(images)
    return {name: torch.cat(parts, -1) for name, parts in seen.items()}


def test_the_moments_are_those_of_what_goes_into_each_adapter():
    base = double_base()
    domain = learned(base)
    found = adapter_moments(base, domain, transforms(domain), lambda: iter(batches()))
    for name, x in inputs_of_adapters(base, domain).items():
        mean, covariance = found[name].taken()
        torch.testing.assert_close(mean, x.mean(-1, keepdim=True), rtol=0, atol=1e-10)
        for group, rows in enumerate(x):
            expected = torch.from_numpy(np.cov(rows.numpy(), bias=True)).view_as(covariance[group])
            torch.testing.assert_close(covariance[group], expected, rtol=0, atol=1e-9)
    base.verify()


def test_components_are_kept_up_to_the_share_of_the_variance():
    torch.manual_seed(0)
    turn, _ = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))
    variances = torch.tensor([5.0, 3.0, 1.5, 0.5], dtype=torch.float64)
    covariance = (turn * variances @ turn.T)[None]
    for energy, kept in ((0.0, 1), (0.49, 1), (0.51, 2), (0.8 - 1e-9, 2), (0.9, 3), (1.0, 4)):
        directions, deviations = principal(covariance, energy)
        assert directions.shape == (1, 4, kept)
        torch.testing.assert_close(deviations[0, 0], variances[:kept].sqrt())
        overlap = directions[0].T @ turn[:, :kept]
        torch.testing.assert_close(overlap.abs(), torch.eye(kept, dtype=torch.float64))


def test_directions_without_variance_are_left_out():
    x = torch.randn(1, 2, 50, dtype=torch.float64)
    x = torch.cat([x, x.sum(1, keepdim=True)], 1)
    directions, _ = principal(x @ x.mT, 1.0)
    assert directions.shape == (1, 3, 2)
    directions, deviations = principal(torch.zeros(1, 3, 3, dtype=torch.float64), 0.9)
    assert directions.shape == (1, 3, 1)
    assert deviations.item() == 1.0


def test_groups_keep_as_many_components_as_the_one_that_needs_most():
    flat, steep = torch.eye(3), torch.diag(torch.tensor([1.0, 0.01, 0.0]))
    directions, deviations = principal(torch.stack([flat, steep]).double(), 0.9)
    assert directions.shape == (2, 3, 3)
    assert torch.isfinite(1 / deviations).all()


def test_whitened_inputs_have_unit_covariance_and_colours_those_of_the_adapters_outputs():
    base = double_base()
    domain = learned(base)
    moments = adapter_moments(base, domain, transforms(domain), lambda: iter(batches()))
    for name, x in inputs_of_adapters(base, domain).items():
        adapter = transforms(domain)[name]
        factors = Factors(adapter, *moments[name].taken(), 1.0)
        slope, offset = adapter.affine()
        y = (x - offset) / slope
        white = factors.whitening @ y - factors.centre
        covariance = white @ white.mT / x.shape[-1]
        eye = torch.eye(covariance.shape[-1], dtype=torch.float64).expand_as(covariance)
        torch.testing.assert_close(covariance, eye, rtol=0, atol=1e-6)
        u = adapter.adapter @ x
        centred = u - u.mean(-1, keepdim=True)
        colours = factors.colouring @ factors.colouring.mT
        torch.testing.assert_close(colours, centred @ centred.mT / x.shape[-1], atol=1e-8, rtol=0)


def test_with_all_components_the_mini_adapters_are_the_adapters():
    base = double_base()
    domain = learned(base, energy=1.0)
    after = following(base, domain).eval()
    assert all(isinstance(t, MiniAdapter) for t in transforms(after).values())
    for name, tensor in domain.weights(base).items():
        torch.testing.assert_close(after.weights(base)[name], tensor, rtol=0, atol=1e-8)
    images, _ = batch(seed=5)
    with torch.no_grad():
        expected = domain(base, images.double())
        torch.testing.assert_close(after(base, images.double()), expected, rtol=0, atol=1e-8)
    assert not torch.equal(after.head.weight, pm.new_domain(base, "covnorm", CLASSES).head.weight)


@pytest.mark.parametrize("energy", [0.5, 0.8, 0.9, 0.99])
def test_the_error_is_bounded_by_the_variance_that_is_left_out(energy):
    base = double_base()
    domain = learned(base, energy=energy)
    after = transforms(following(base, domain))
    for name, x in inputs_of_adapters(base, domain).items():
        adapter, mini = transforms(domain)[name], after[name]
        A = adapter.adapter
        up, down, shift = mini.factors()
        slope, offset = adapter.affine()
        u = A @ x
        lost = (u - (up @ (down @ ((x - offset) / slope)) + shift)).square().sum(1).mean(-1)
        total_x = x.var(-1, correction=0).sum(-1)
        total_u = u.var(-1, correction=0).sum(-1)
        largest = torch.linalg.matrix_norm(A, 2)
        bound = (1 - energy) * (total_u + largest.square() * total_x)
        assert (lost <= bound + 1e-9).all()


def test_the_mini_adapter_is_that_of_least_squares():
    base = double_base()
    domain = learned(base, energy=0.8)
    after = following(base, domain)
    x = inputs_of_adapters(base, domain)["plain.weight"][0]
    adapter, mini = transforms(domain)["plain.weight"], transforms(after)["plain.weight"]
    slope, offset = adapter.affine()
    white = mini.whitening[0] @ ((x - offset[0]) / slope[0]) - mini.centre[0]
    u = adapter.adapter[0] @ x
    coloured = torch.linalg.lstsq(mini.colouring[0], u - mini.shift[0]).solution
    expected = torch.linalg.lstsq(white.T, coloured.T).solution.T
    torch.testing.assert_close(mini.mini[0].detach(), expected, rtol=0, atol=1e-8)


def test_ranks_shrink_with_the_share_that_is_asked_for():
    base = double_base()
    found = [
        following(base, learned(base, energy=energy)).method.ranks["plain.weight"] for energy in (1.0, 0.9, 0.5, 0.0)
    ]
    assert found[0] == (16, 16)
    assert found[-1] == (1, 1)
    assert all(a >= b for ks in zip(*found, strict=True) for a, b in pairwise(ks))
    assert found[1][0] < 16


def test_each_group_is_compressed_on_its_own():
    base = double_base()
    after = transforms(following(base, learned(base)))
    assert after["depthwise.weight"].mini.shape == (8, 1, 1)
    assert after["grouped.weight"].colouring.shape[:2] == (4, 4)


def test_ranks_are_options_that_json_gives_back():
    method = pm.create_method("covnorm", ranks={"stem.weight": (3, 2)}, energy=0.7)
    again = pm.create_method("covnorm", **json.loads(json.dumps(method.options())))
    assert again == method
    assert again.ranks == {"stem.weight": (3, 2)}
    assert hash(again) == hash(method)


def test_a_domain_costs_two_factors_of_the_smaller_rank_and_an_offset():
    base = pm.load_base("decathlon-resnet26", pretrained=False, device="meta")
    ranks = {n: (max(2, s.channels // 10), s.channels // 8) for n, s in base.sites.items()}
    account = pm.account(base, pm.create_method("covnorm", ranks=ranks), domains=10)
    numbers = sum(s.channels * (2 * min(ranks[n]) + 1) for n, s in base.sites.items())
    assert account.components["weights"] == 32 * numbers
    assert account.components["norm_affine"] == 32 * 2 * 3_872
    # A tenth of the channels: the literature prints 1.25.
    assert 1.2 < account.params_paper < 1.26
    full = pm.account(base, "covnorm", domains=10)
    assert full.params_paper == pm.account(base, "series-adapter", domains=10).params_paper


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"energy": 1.5}, r"energy=1\.5 must be a number from 0 to 1"),
        ({"ranks": 3}, "ranks=3 must be"),
        ({"ranks": {"stem.weight": 3}}, "ranks of stem.weight are 3"),
        ({"ranks": {"stem.weight": (0, 3)}}, r"ranks of stem.weight are \(0, 3\)"),
        ({"ranks": {"stem.weight": (1.5, 3)}}, "from 1 on"),
        ({"energies": 0.5}, "no option 'energies'"),
    ],
)
def test_a_senseless_option_of_covnorm_is_refused_by_name(options, message):
    with pytest.raises(pm.MethodError, match=message):
        pm.create_method("covnorm", **options)


def test_a_rank_above_the_number_of_channels_is_refused():
    with pytest.raises(pm.MethodError, match=r"stem.weight are \[9, 2\], but it has 8 channels"):
        pm.new_domain(tiny_base(), "covnorm", None, ranks={"stem.weight": (9, 2)})


RECIPE = Recipe(epochs=4, rate=3e-3, head_rate=1e-2, drops=(), batch_size=8)
NAMES = ("mini", "colouring", "whitening", "centre", "shift")


def test_training_has_two_stages_and_the_second_learns_the_mini_adapters_alone():
    base = tiny_base()
    torch.manual_seed(0)
    domain = pm.new_domain(base, "covnorm", CLASSES, sites="conv")
    seen = []

    class Watching(Listener):
        def epoch(self, record, seconds):
            some = transforms(domain)["plain.weight"]
            seen.append({n: t.detach().clone() for n, t in some.state_dict().items()})

    history = fit(base, domain, TRAIN, VAL, RECIPE, listener=Watching())
    assert [record.epoch for record in history] == list(range(4))  # one budget for both stages
    assert ["adapter" in state for state in seen] == [True] * 2 + [False] * 2
    before, after = seen[-2:]
    assert {name: torch.equal(before[name], after[name]) for name in NAMES} == {
        "mini": False, "colouring": True, "whitening": True, "centre": True, "shift": True,
    }  # fmt: skip
    assert domain.method.ranks.keys() == transforms(domain).keys()
    assert not any(p.requires_grad for p in domain.parameters())
    base.verify()


def test_it_learns_in_both_stages():
    base = tiny_base()
    torch.manual_seed(0)
    domain = pm.new_domain(base, "covnorm", CLASSES, sites="conv")
    recipe = dataclasses.replace(RECIPE, epochs=24, selection="last")
    history = fit(base, domain, TRAIN, VAL, recipe)
    assert history[11].loss < history[0].loss - 0.4
    assert history[-1].loss < history[11].loss + 0.05
    assert history[-1].val_accuracy > 90


@pytest.mark.parametrize("place", [(0, 2), (1, 4), (2, 2), (3, 1)])
def test_a_run_that_is_stopped_in_either_stage_resumes_to_the_bit(tmp_path, place):
    base = tiny_base()

    def fresh():
        torch.manual_seed(0)
        return pm.new_domain(base, "covnorm", CLASSES)

    whole = fresh()
    expected = fit(base, whole, TRAIN, VAL, RECIPE)
    checkpoint = tmp_path / "c.safetensors"
    with pytest.raises(InterruptedTraining):
        fit(base, fresh(), TRAIN, VAL, RECIPE, checkpoint=checkpoint,
            listener=StopAt(*place, signal.SIGTERM))  # fmt: skip
    resumed = fresh()
    assert fit(base, resumed, TRAIN, VAL, RECIPE, checkpoint=checkpoint, resume=True) == expected
    assert same(whole, resumed)
    assert resumed.method == whole.method


def test_a_compressed_domain_is_saved_merged_and_loaded_bit_exactly(tmp_path):
    base = tiny_base()
    domain = following(base, learned(base, torch.float32)).eval()
    images, _ = batch()
    with torch.no_grad():
        expected = domain(base, images)
        assert torch.equal(domain.frozen()(base, images), expected)
        assert torch.equal(domain.merged(base)(images), expected)
        domain.save(tmp_path / "d.safetensors")
        loaded = pm.load_domain(tmp_path / "d.safetensors", base)
        assert torch.equal(loaded(base, images), expected)
    assert loaded.method == domain.method
    assert set(loaded.method.ranks.values()) == set(domain.method.ranks.values())
    stored = transforms(loaded)["plain.weight"].stored()
    rank = min(domain.method.ranks["plain.weight"])
    assert {n: tuple(t.shape) for n, t in stored.items()} == {
        "up": (1, 16, rank), "down": (1, rank, 16), "offset": (1, 16, 1),
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [(3, 5), (5, 3), (4, 4)])
def test_the_stored_form_gives_the_same_weights_to_the_bit(ranks):
    base = tiny_base()
    domain = pm.new_domain(base, "covnorm", CLASSES, sites="conv", ranks={"plain.weight": ranks})
    mini = transforms(domain)["plain.weight"]
    with torch.no_grad():
        for name in NAMES:
            getattr(mini, name).normal_()
    W, b = base.tensor("plain.weight"), base.tensor("plain.bias")
    C, M, white = mini.colouring[0].double(), mini.mini[0].double(), mini.whitening[0].double()
    A = (C @ M @ white).detach()
    expected = W.double() + torch.einsum("oc,cihw->oihw", A, W.double())
    offset = mini.shift[0, :, 0].double() - (C @ M @ mini.centre[0].double())[:, 0].detach()
    before = mini.weight(W).detach(), mini.bias(b).detach()
    torch.testing.assert_close(before[0].double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(before[1].double(), b + A @ b.double() + offset, rtol=0, atol=1e-4)
    mini.restore(mini.stored())
    assert torch.equal(mini.weight(W), before[0])
    assert torch.equal(mini.bias(b), before[1])
    assert mini.mini is None


def test_a_domain_made_with_ranks_starts_at_the_base_and_learns():
    base = tiny_base()
    domain = pm.new_domain(base, "covnorm", CLASSES, ranks={"stem.weight": (3, 2)})
    images, labels = batch()
    with torch.no_grad():
        features = domain.eval().features(base, images)
        torch.testing.assert_close(features, base.net(images), rtol=0, atol=1e-6)
    F.cross_entropy(domain.train()(base, images), labels).backward()
    assert transforms(domain)["stem.weight"].mini.grad.any()
    assert isinstance(transforms(domain)["grouped.weight"], Adapter)


def test_adapters_that_learned_nothing_are_compressed_to_nothing():
    base = tiny_base()
    domain = pm.new_domain(base, "covnorm", CLASSES).frozen()
    after = following(base, domain)
    assert all(math.isfinite(t.abs().max()) for t in after.state_dict().values())
    images, _ = batch()
    with torch.no_grad():
        expected = domain(base, images)
        torch.testing.assert_close(after.eval()(base, images), expected, rtol=0, atol=1e-5)


def test_there_is_no_third_stage():
    base = tiny_base()
    after = following(base, learned(base, torch.float32)).frozen()
    assert following(base, after) is None


def test_the_second_stage_makes_a_domain_smaller():
    base = tiny_base()
    before = learned(base, torch.float32, energy=0.5)
    after = following(base, before)
    sizes = [sum(component_bits(d).values()) for d in (before, after)]
    assert sizes[1] < sizes[0]


class Reader(torch.nn.Module):
    """A layer whose weight its parent reads, as attention does: it is never called."""

    def __init__(self):
        super().__init__()
        self.first, self.read, self.last = torch.nn.Linear(12, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.last(F.linear(x, self.read.weight, self.read.bias))


def test_a_layer_that_the_network_never_calls_is_left_as_it_is():
    base = pm.load_base(Reader(), name="reader", input=pm.InputSpec(shape=(3, 2, 2)))
    domain = pm.new_domain(base, "covnorm", CLASSES, sites="all")
    adapters = {n: t for n, t in domain.named_transforms() if isinstance(t, Adapter)}
    assert set(adapters) == {"first.weight"}
    images = [(torch.randn(4, 3, 2, 2), torch.zeros(4))]
    assert adapter_moments(base, domain, adapters, lambda: images)["first.weight"].count
