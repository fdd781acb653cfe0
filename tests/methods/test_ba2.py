"""BA²: what a switch does, what a domain stores, what it costs and what its network saves."""

import pytest
import torch
from torch import nn

import polymask as pm
from nets import SPEC, batch, block_base, tiny_base, trained
from polymask.core.bits import Bits
from polymask.core.survey import Site
from polymask.methods.ba2 import Ba2, Switches

LAYER = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
BUDGETS = {"ba2": 1.0, "ba2-75": 0.75, "ba2-50": 0.5, "ba2-25": 0.25}


def transform_of(layer: nn.Module, kind: str, **options) -> Switches:
    weight = layer.weight
    groups, shape = getattr(layer, "groups", 1), tuple(weight.shape)
    site = Site("weight", shape, kind, groups, "bias", False, None, False, weight.dtype)
    return Ba2(**options).transform(site)


def set_scores(transform: Switches, scores) -> None:
    with torch.no_grad():
        transform.scores.copy_(torch.as_tensor(scores))


def layers():
    """(a layer in float64, its kind, a batch for it) of every kind, grouped and depthwise too."""
    sizes = [7, 6, 5]
    for dims, make in LAYER.items():
        for groups in (1, 2, 8):
            layer = make(8, 16, 3, 2, 1, groups=groups, bias=groups != 2)
            yield layer.double(), f"conv{dims}d", torch.randn(2, 8, *sizes[:dims]).double()
    for groups in (1, 2, 8):
        layer = nn.ConvTranspose2d(8, 16, 3, 2, groups=groups, bias=groups != 2)
        yield layer.double(), "conv_transpose2d", torch.randn(2, 8, 5, 4).double()
    yield nn.Linear(8, 5).double(), "linear", torch.randn(3, 4, 8).double()


def channel_view(kind: str, dims: int):
    return (8,) if kind == "linear" else (8,) + (1,) * (dims - 2)


def test_switching_a_channel_off_is_to_feed_the_layer_zeros_there():
    torch.manual_seed(0)
    for layer, kind, x in layers():
        transform = transform_of(layer, kind).eval()
        set_scores(transform, [1, -1, 2, -2, -3, 0.5, -1, 0])
        s = torch.tensor([1, 0, 1, 0, 0, 1, 0, 1]).double().view(channel_view(kind, x.ndim))
        y = torch.func.functional_call(layer, {"weight": transform.weight(layer.weight)}, (x,))
        torch.testing.assert_close(y, layer(x * s), rtol=0, atol=1e-12, msg=str(layer))


def test_the_scores_gradient_is_that_of_real_switches():
    """The identity stands in for the threshold; of real switches E is a polynomial: autograd."""
    torch.manual_seed(0)
    for layer, kind, x in layers():
        transform = transform_of(layer, kind)
        set_scores(transform, [1, -1, 2, -2, -3, 0.5, -1, 0])
        y = torch.func.functional_call(layer, {"weight": transform.weight(layer.weight)}, (x,))
        y.square().sum().backward()
        s = torch.tensor([1.0, 0, 1, 0, 0, 1, 0, 1]).double().requires_grad_()
        layer(x * s.view(channel_view(kind, x.ndim))).square().sum().backward()
        torch.testing.assert_close(transform.scores.grad, s.grad, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("method", BUDGETS)
def test_a_fresh_domain_trains_from_the_base_itself(method):
    base = tiny_base()
    domain = pm.new_domain(base, method, None).train()
    for name, transform in domain.named_transforms():
        assert torch.equal(transform.weight(base.tensor(name)), base.tensor(name))


def test_scores_start_in_proportion_to_the_norms_of_a_channels_weights():
    base = tiny_base()
    domain = pm.new_domain(base, "ba2", None, start=0.02)
    transforms = dict(domain.named_transforms())
    W = base.tensor("grouped.weight")  # (16, 2, 3, 3), four groups of two channels
    norms = torch.stack([W[4 * (c // 2) : 4 * (c // 2) + 4, c % 2].norm() for c in range(8)])
    expected = 0.02 * norms / norms.mean()
    torch.testing.assert_close(transforms["grouped.weight"].scores.detach(), expected)


def test_the_stored_form_is_one_bit_an_input_channel_and_no_scores():
    base = tiny_base()
    frozen = trained(base, "ba2-50").frozen()
    sizes = {}
    for name, transform in frozen.named_transforms():
        bits = transform.stored()["mask"]
        assert isinstance(bits, Bits)
        sizes[name.removesuffix(".weight")] = bits.numel
        assert not list(transform.parameters())
    assert sizes == {"stem": 3, "depthwise": 8, "grouped": 8, "plain": 16, "hidden": 16}


def test_a_layer_that_reads_one_channel_is_left_alone():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten())
    base = pm.load_base(net, input=pm.InputSpec((1, 6, 6), (0.5,), (0.5,)))
    domain = pm.new_domain(base, "ba2-50", None)
    assert [name for name, _ in domain.named_transforms()] == ["1.weight"]


def halve(domain: pm.Domain, seed: int = 0) -> pm.Domain:
    """Exactly half of the channels of every site on, at random; one of three colours."""
    torch.manual_seed(seed)
    for _, transform in domain.named_transforms():
        set_scores(transform, torch.rand(transform.channels))
    return domain.eval()


@pytest.mark.parametrize("make", [tiny_base, block_base])
def test_a_compact_network_gives_the_merged_ones_logits(make):
    base = make()
    domain = halve(trained(base, "ba2-50"))
    images, _ = batch()
    whole, compact = domain.merged(base), domain.merged(base, compact=True)
    with torch.no_grad():
        torch.testing.assert_close(compact(images), whole(images), rtol=0, atol=1e-5)
    assert not any(p.requires_grad for p in compact.parameters())
    assert not any(module.training for module in compact.modules())
    sizes = [sum(p.numel() for p in net.parameters()) for net in (compact, whole)]
    assert sizes[0] < 0.6 * sizes[1]
    frozen = domain.frozen().merged(base, compact=True)
    with torch.no_grad():
        assert torch.equal(frozen(images), compact(images))
    base.verify()


# What the paper prints for BA² is 1.03. One 32-bit number a switch and all four of a norm's
# channel give it (METHODS.md 2.3). A switch is a bit here, and the paper that this library follows
# counts two numbers for a norm's channel: then it is 1.011 (ResNet-50) and 1.012.
ACCOUNTS = [  # base, domains, BN channels, as the affine paper counts, as stored
    ("torchvision:resnet50", 6, 26_560, 1.0114, 1.0227),
    ("decathlon-resnet26", 10, 3_872, 1.0121, 1.0241),
    ("decathlon-wrn28", 10, 4_048, 1.0126, 1.0251),
]


@pytest.mark.parametrize(("name", "domains", "norm_channels", "paper", "stored"), ACCOUNTS)
def test_a_domain_costs_its_norms_and_one_bit_a_channel(name, domains, norm_channels, paper, stored):
    base = pm.load_base(name, pretrained=False, device="meta")
    account = pm.account(base, "ba2-50", domains=domains)
    inputs = sum(site.shape[1] for site in base.sites.values())
    assert account.components["mask"] == inputs
    assert account.components["norm_affine"] == 2 * 32 * norm_channels
    assert sum(account.components.values()) == inputs + 4 * 32 * norm_channels
    assert round(account.params_paper, 4) == paper
    assert round(account.params_stored, 4) == stored
    for switches in (norm_channels, inputs):  # whichever the paper counts
        floats = 4 * norm_channels + switches
        assert round(1 + floats * (domains - 1) / account.base_parameters, 2) == 1.03


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget=0 must be more than 0"),
        ({"budget": 1.5}, "budget=1.5 must be a number from 0 to 1"),
        ({"budget": "half"}, "budget='half' must be a number"),
        ({"start": -1e-3}, r"start=-0.001 must be a number from 0 to 1"),
        ({"ascent": -1}, "ascent=-1 must be a number from 0 to 1"),
        ({"bugdet": 0.5}, "no option 'bugdet'; did you mean budget"),
    ],
)
def test_a_senseless_option_is_refused_by_name(options, message):
    with pytest.raises(pm.MethodError, match=message):
        pm.create_method("ba2", **options)


def test_half_and_double_precision_keep_their_types():
    for dtype, learned in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten())
        base = pm.load_base(net.to(dtype), input=SPEC)
        domain = pm.new_domain(base, "ba2-50", None)
        weights = domain.weights(base)
        assert all(t.dtype == dtype for t in weights.values())
        sum(t.float().square().sum() for t in weights.values()).backward()
        assert {t.scores.grad.dtype for _, t in domain.named_transforms()} == {learned}
        images = batch()[0].to(dtype)
        halve(domain)
        whole, compact = domain.merged(base), domain.merged(base, compact=True)
        tolerance = 0.05 if dtype == torch.bfloat16 else 1e-12
        torch.testing.assert_close(compact(images), whole(images), rtol=0, atol=tolerance)
