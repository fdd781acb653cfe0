"""Progressive networks: columns and laterals by an independent computation, order, growth."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polymask as pm
from nets import SPEC, BasicBlock, batch, block_base, block_net, logits, train
from polymask.core.accounting import account, component_bits
from polymask.core.domain import Domain
from polymask.core.network import put_tensors
from polymask.methods.progressive import Progressive
from polymask.train.fit_all import Lesson, fit_all
from polymask.train.recipe import Recipe
from short_training import Fixed

RECIPE = Recipe(epochs=5, rate=3e-3, weight_rate=1e-3, head_rate=3e-2, drops=(), batch_size=8)
BLOCKS = ("stages.0.0", "stages.1.0", "stages.1.1", "stages.2.0")


def double_base() -> pm.Base:
    return pm.load_base(block_net().double(), input=SPEC)


def worn_domains(base: pm.Base, count: int, **options) -> list[Domain]:
    """Domains one after another, of which every tensor that learns is not as at the start."""
    torch.manual_seed(1)
    method = pm.create_method("progressive", **options)
    domains: list[Domain] = []
    for _ in range(count):
        mine = method.after(domains)
        domain = pm.new_domain(base, mine, ["a", "b"])
        mine.follow(domain, domains)
        with torch.no_grad():
            for own in domain.norms.values():
                if hasattr(own, "running_var"):
                    own.running_var.uniform_(0.5, 1.5)
            for parameter in domain.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        domains.append(domain.frozen())
    return domains


def column(weights: dict[str, Tensor], laterals, images: Tensor, earlier) -> tuple[list, Tensor]:
    """What enters each block of an ordinary network with these weights, and its features."""
    net = block_net().double().eval()
    put_tensors(net, weights)
    x = F.relu(net.stem_bn(net.stem(images)))
    entering = []
    for i, name in enumerate(BLOCKS):
        entering.append(x)
        y = net.get_submodule(name)(x)
        for path, other in zip(laterals[i] if laterals else [], earlier, strict=True):
            h = path.scale * other[i]
            if h.shape[-1] != y.shape[-1]:
                h = F.avg_pool2d(h, 2)
            h = torch.einsum("oc,nchw->nohw", path.reduce, h).clamp_min(0)
            y = y + torch.einsum("oc,nchw->nohw", path.expand, h)
        x = y
    return entering, x.mean((2, 3))


@torch.no_grad()
def test_columns_and_laterals_are_those_of_the_formula():
    base = double_base()
    domains = worn_domains(base, 3)
    images = batch()[0].double()
    earlier = [column({}, None, images, [])[0]]
    for domain in domains:
        weights = {n: t.clone() for n, t in domain.weights(base).items()}
        entering, expected = column(weights, domain.route.laterals, images, earlier)
        found = domain.features(base, images)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
        earlier.append(entering)


def test_in_training_mode_only_the_own_column_sees_the_batchs_statistics():
    base = double_base()
    domain = worn_domains(base, 2)[1]
    images = batch()[0].double()
    before = {name: t.clone() for name, t in domain.state_dict().items()}
    with torch.no_grad():
        seen: list[dict[str, Tensor]] = []
        domain.route._run(base, {}, images, None, seen)
        expected = {name: t.clone() for name, t in seen[0].items()}
        domain.train().features(base, images)
        seen.clear()
        domain.eval().route._run(base, {}, images, None, seen)
    assert all(torch.equal(seen[0][name], expected[name]) for name in expected)
    changed = {n for n, t in domain.state_dict().items() if not torch.equal(t, before[n])}
    assert changed
    assert all(n.startswith("norms.") for n in changed)
    assert not any(module.training for module in base.net.modules())
    base.verify()


@pytest.mark.parametrize("count", [1, 3])
@torch.no_grad()
def test_a_fresh_domain_is_the_base(count):
    base = block_base()
    images = batch()[0]
    domain = pm.new_domain(base, "progressive", None, columns=count).eval()
    assert torch.equal(domain.features(base, images), base.net(images))


@torch.no_grad()
def test_from_scratch_the_weights_are_drawn_anew():
    base = double_base()
    domain = pm.new_domain(base, "progressive", ["a"], start="scratch")
    weights = domain.weights(base)
    for name, site in base.sites.items():
        correlation = F.cosine_similarity(weights[name].ravel(), base.tensor(name).ravel(), dim=0)
        assert abs(correlation) < 0.5
        fan_in = site.numel / site.channels
        assert weights[name].std() == pytest.approx((2 / fan_in) ** 0.5, rel=0.35)


def test_earlier_domains_are_bit_identical_after_a_later_one_is_learned():
    base = block_base()
    method = pm.create_method("progressive")
    domains: list[Domain] = []
    before: list[Tensor] = []
    for seed in range(3):
        torch.manual_seed(seed)
        mine = method.after(domains)
        domain = pm.new_domain(base, mine, ["a", "b", "c"])
        mine.follow(domain, domains)
        train(base, domain, rate=1e-2, seed=seed)
        for earlier, then in zip(domains, before, strict=True):
            assert torch.equal(logits(base, earlier), then)
        domains.append(domain.frozen())
        before.append(logits(base, domain))
    base.verify()
    # What the last domain keeps of the others is what they are.
    last = domains[2].route
    for place, earlier in enumerate(domains[:2]):
        weights = earlier.weights(base)
        kept = last.columns[place].weights(base)
        assert all(torch.equal(kept[name], weights[name]) for name in kept)
        its, mine = earlier.route.laterals, last.columns[place].laterals
        assert all(torch.equal(t, mine.state_dict()[n]) for n, t in its.state_dict().items())


def test_what_earlier_domains_learned_reaches_a_later_one():
    base = block_base()
    second = worn_domains(base, 2)[1]
    before = logits(base, second)
    with torch.no_grad():
        for buffer in second.route.columns[0].tensors.buffers():
            buffer.mul_(1.1)
    assert not torch.equal(logits(base, second), before)


def test_only_the_own_column_its_laterals_and_the_head_learn():
    base = block_base()
    method = pm.create_method("progressive")
    earlier = worn_domains(base, 2)
    domain = pm.new_domain(base, method.after(earlier), ["a", "b", "c"])
    domain.method.follow(domain, earlier)
    names = {name for name, p in domain.named_parameters() if p.requires_grad}
    assert not any(name.startswith("route.columns.") for name in names)
    frozen = {n: t.clone() for n, t in domain.route.columns.state_dict().items()}
    weights = {id(p) for p in domain.param_groups()["weights"]}
    assert weights == {id(p) for p in domain.transforms.parameters()}
    train(base, domain, rate=1e-2)
    assert all(torch.equal(t, frozen[n]) for n, t in domain.route.columns.state_dict().items())
    assert all(p.grad is not None for p in domain.parameters())


def test_domains_in_turn_learn_and_their_packs_stand_alone(tmp_path):
    base = block_base()
    lessons = {
        name: Lesson(["a", "b", "c"], Fixed(4, offset), Fixed(1, offset + 99))
        for name, offset in (("one", 0), ("two", 10), ("three", 20))
    }
    fitted = fit_all(base, lessons, "progressive", RECIPE, norms="own", folder=tmp_path)
    assert fitted.forgotten == {"one": 0.0, "two": 0.0, "three": 0.0}
    for place, (name, domain) in enumerate(fitted.domains.items(), 1):
        assert domain.method.columns == place
        history = fitted.histories[name]
        assert history[-1].loss < history[0].loss / 2
        loaded = pm.load_domain(tmp_path / f"{name}.safetensors", base)
        assert torch.equal(logits(base, loaded), logits(base, domain))
    base.verify()


def test_a_pack_loads_on_a_base_with_other_sites_chosen(tmp_path):
    chosen = block_base(include=["stages.1.*"])
    second = worn_domains(chosen, 2)[1]
    second.save(tmp_path / "second.safetensors")
    loaded = pm.load_domain(tmp_path / "second.safetensors", block_base())
    assert torch.equal(logits(block_base(), loaded), logits(chosen, second))


@pytest.mark.parametrize("norms", ["own", "shared", "affine", "stats"])
def test_every_policy_for_norms_holds_for_all_columns(norms):
    base = block_base()
    first, second = worn_domains(base, 2, norms=norms)
    kept, weights = second.route.columns[0].weights(base), first.weights(base)
    counters = {name for name in weights if name.endswith("num_batches_tracked")}
    assert kept.keys() == weights.keys() - counters
    assert all(torch.equal(kept[name], weights[name]) for name in kept)


def test_the_cost_grows_with_the_square_of_the_number_of_columns():
    base = pm.load_base("decathlon-resnet26", pretrained=False, device="meta")
    totals = [account(base, pm.create_method("progressive", columns=columns), domains=2) for columns in range(1, 6)]
    channels = [32, *[64] * 4, *[128] * 4, *[256] * 4]
    path = sum((before // 4) * (before + after) + 1 for before, after in pairwise(channels))
    share = path / totals[0].base_parameters
    for columns, total in enumerate(totals, 1):
        expected = 1 + columns + share * columns * (columns + 1) / 2
        assert total.params_paper == pytest.approx(expected, abs=1e-9)
    pack = component_bits(worn_domains(block_base(), 3)[2])
    sizes = [component_bits(d)["weights"] for d in worn_domains(block_base(), 2)]
    affine = pack["norm_affine"]
    scalars = 32 * 4 * (1 + 2)  # one for each of four blocks and each earlier column
    assert pack["shared"] == sum(sizes) + 2 * affine + scalars


def test_layers_with_biases_and_vectors_have_laterals_too():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 6),
        nn.ReLU(inplace=True),
        nn.Linear(6, 3),
    ).double()
    base = pm.load_base(net, input=SPEC)
    images = batch()[0].double()
    second = worn_domains(base, 2)[1]
    kept = second.route.columns[0].weights(base)
    assert set(kept) == {"0.weight", "0.bias", "4.weight", "4.bias"}

    def path(lateral, x):
        x = F.relu(lateral.scale * x @ lateral.reduce.T)
        return x @ lateral.expand.T

    own = second.weights(base)
    with torch.no_grad():
        columns, found = [({}, None), (kept, second.route.columns[0].laterals)], []
        for weights, laterals in [*columns, (own, second.route.laterals)]:
            weights = dict(base.net.named_parameters()) | weights
            x = F.conv2d(images, weights["0.weight"], weights["0.bias"], 2)
            for lateral in laterals[0] if laterals else ():
                pooled = F.adaptive_avg_pool2d(images, x.shape[2:])
                x = x + path(lateral, pooled.movedim(1, 3)).movedim(3, 1)
            x = F.relu(x).mean((2, 3))
            y = F.linear(x, weights["4.weight"], weights["4.bias"])
            for lateral, earlier in zip(laterals[1] if laterals else (), found, strict=True):
                y = y + path(lateral, earlier)
            found.append(x)
        torch.testing.assert_close(second.features(base, images), F.relu(y), rtol=0, atol=1e-12)


def test_a_block_that_enlarges_maps_and_images_of_another_size_are_matched():
    class Upsampling(BasicBlock):
        def forward(self, x):
            return F.interpolate(super().forward(x), scale_factor=2)

    torch.manual_seed(0)
    blocks = nn.Sequential(BasicBlock(3, 4, stride=2), Upsampling(4, 6), BasicBlock(6, 6))
    net = nn.Sequential(blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    base = pm.load_base(net, input=SPEC)
    second = worn_domains(base, 2)[1]
    assert second(base, torch.randn(2, 3, 21, 15)).shape == (2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": 0}, "columns=0 must be a whole number"),
        ({"columns": True}, "columns=True must be a whole number"),
        ({"reduction": 0.5}, "reduction=0.5 must be a whole number"),
        ({"start": "random"}, "start='random' is not one of base, scratch"),
    ],
)
def test_a_senseless_option_is_refused_by_name(options, message):
    with pytest.raises(pm.MethodError, match=message):
        Progressive(**options)


def test_domains_in_a_wrong_order_or_of_other_options_are_refused():
    base = block_base()
    first, second = worn_domains(base, 2)
    domain = pm.new_domain(base, second.method.after([first, second]), ["a"])
    for earlier in ([second, first], [first], [first, second, second]):
        with pytest.raises(pm.MethodError, match="in the order of learning"):
            domain.method.follow(domain, earlier)
    other = replace(domain.method, reduction=2)
    with pytest.raises(pm.MethodError, match="the same other options"):
        other.follow(pm.new_domain(base, other, ["a"]), [first, second])


@pytest.mark.parametrize("name", ["torchvision:vit_b_16", "torchvision:swin_t"])
def test_a_network_of_tokens_is_refused(name):
    base = pm.load_base(name, pretrained=False, device="meta")
    with pytest.raises(pm.BaseError, match="lateral paths are made for feature maps"):
        pm.new_domain(base, "progressive", None)
