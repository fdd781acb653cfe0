"""DAN: what a controller does to a layer's output, its blocks, its start, bias and cost."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymask as pm
from nets import SPEC, batch, tiny_base, trained
from polymask.core.registry import skeleton
from polymask.core.survey import Site
from polymask.methods.dan import Dan

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
LAYER = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
PRESETS = ["dan", "dan-diagonal"]


def site_of(layer: nn.Module, kind: str, name: str = "weight") -> Site:
    groups = getattr(layer, "groups", 1)
    weight, has_bias = layer.weight, layer.bias is not None
    shape = tuple(weight.shape)
    return Site(name, shape, kind, groups, "bias", has_bias, None, False, weight.dtype)


def random_controller(layer: nn.Module, kind: str, **options):
    """A transform whose every parameter is drawn from N(0, 1)."""
    transform = Dan(**options).transform(site_of(layer, kind))
    for parameter in transform.parameters():
        nn.init.normal_(parameter)
    return transform


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_controller_is_a_1x1_mixing_of_the_outputs_of_each_group(dims, groups):
    torch.manual_seed(0)
    layer = LAYER[dims](4, 8, 3, 2, 1, groups=groups, bias=False).double()
    transform = random_controller(layer, f"conv{dims}d")
    P = transform.controller
    assert P.shape == (groups, 8 // groups, 8 // groups)
    x = torch.randn(2, 4, *[9, 8, 7][:dims], dtype=torch.float64)

    y = CONV[dims](x, transform.weight(layer.weight), None, 2, 1, groups=groups)

    mixing = P.reshape(8, 8 // groups, *(1,) * dims)
    expected = CONV[dims](layer(x), mixing, groups=groups)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_controller_mixes_the_outputs_of_a_transposed_convolution(groups):
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(4, 6, 3, 2, groups=groups, bias=False).double()
    transform = random_controller(layer, "conv_transpose2d")
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    y = F.conv_transpose2d(x, transform.weight(layer.weight), None, 2, groups=groups)
    mixing = transform.controller.reshape(6, 6 // groups, 1, 1)
    torch.testing.assert_close(y, F.conv2d(layer(x), mixing, groups=groups), rtol=0, atol=1e-11)


def test_a_controller_of_a_linear_layer_is_a_linear_layer_after_it():
    torch.manual_seed(0)
    layer = nn.Linear(5, 7, bias=False).double()
    transform = random_controller(layer, "linear", always=True)
    x = torch.randn(3, 5, dtype=torch.float64)
    y = F.linear(x, transform.weight(layer.weight))
    torch.testing.assert_close(y, F.linear(layer(x), transform.controller[0]), rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["conv2d", "conv_transpose2d"])
def test_a_diagonal_controller_scales_output_channels(kind):
    torch.manual_seed(0)
    make = nn.Conv2d if kind == "conv2d" else nn.ConvTranspose2d
    layer = make(4, 6, 3, groups=2, bias=False).double()
    transform = random_controller(layer, kind, controller="diagonal")
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    run = F.conv2d if kind == "conv2d" else F.conv_transpose2d
    y = run(x, transform.weight(layer.weight), groups=2)
    torch.testing.assert_close(y, layer(x) * transform.scale.view(6, 1, 1), rtol=0, atol=1e-12)


def test_stacked_projections_of_query_key_and_value_are_not_mixed():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, bias=False).double()
    W = attention.in_proj_weight
    site = Site("a.in_proj_weight", (12, 4), "in_projection", 1, "", False, None, False, W.dtype)
    transform = Dan(always=True).transform(site)
    P = nn.init.normal_(transform.controller)
    assert P.shape == (3, 4, 4)
    expected = torch.cat([P[i] @ part for i, part in enumerate(W.chunk(3))])
    torch.testing.assert_close(transform.weight(W), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_identity_controller_is_the_base_bit_for_bit(method, dtype):
    net = tiny_base().net.to(dtype)
    base = pm.load_base(net, input=SPEC)
    images = batch()[0].to(dtype)
    domain = pm.new_domain(base, method, None, start="identity").eval()
    with torch.no_grad():
        assert all(torch.equal(t, base.tensor(n)) for n, t in domain.weights(base).items())
        assert torch.equal(domain.features(base, images), base.net(images))


@pytest.mark.parametrize("method", PRESETS)
@pytest.mark.parametrize("groups", [1, 512])
def test_a_controller_starts_near_the_identity_as_in_the_original_code(method, groups):
    torch.manual_seed(0)
    layer = nn.Conv2d(512, 512, 3, groups=groups)
    transform = pm.create_method(method).transform(site_of(layer, "conv2d"))
    diagonal = transform.scale
    if method == "dan":
        diagonal = transform.controller.diagonal(dim1=1, dim2=2)
        assert torch.equal(transform.controller, torch.diag_embed(diagonal))
    noise = (diagonal - 1) * 512
    assert noise.shape == (groups, 512 // groups)
    assert abs(noise.mean().item()) < 0.2
    assert abs(noise.std().item() - 1) < 0.1


@pytest.mark.parametrize("method", PRESETS)
def test_where_the_base_has_a_bias_the_domain_learns_its_own(method):
    base = tiny_base()
    with_bias = {name for name, site in base.sites.items() if site.has_bias}
    fresh = pm.new_domain(base, method, ["a", "b", "c"], always=True).weights(base)
    learned = trained(base, method, always=True).weights(base)
    biases = {name for name in fresh if name.endswith(".bias")}
    assert biases == {base.sites[name].bias for name in with_bias} == {"plain.bias", "hidden.bias"}
    assert all(torch.equal(fresh[name], base.tensor(name)) for name in biases)
    assert not any(torch.equal(learned[name], base.tensor(name)) for name in biases)


def test_scale_and_shift_of_the_norms_stay_the_bases_while_statistics_move():
    base = tiny_base()
    weights = trained(base, "dan").weights(base)
    own = {name for name in weights if "_bn." in name}
    assert {name.rpartition(".")[2] for name in own} >= {"running_mean", "running_var"}
    assert not any(name.endswith(("_bn.weight", "_bn.bias")) for name in own)
    assert not torch.equal(weights["stem_bn.running_mean"], base.tensor("stem_bn.running_mean"))


def test_a_site_is_left_alone_where_its_controller_would_not_be_smaller():
    base = tiny_base()

    def controlled(method):
        domain = pm.new_domain(base, method, None)
        return {name.removesuffix(".weight") for name, _ in domain.named_transforms()}

    # 1x1, 16 to 16 channels: as many numbers as P. Depthwise: one of P for nine weights.
    assert controlled("dan") == {"stem", "depthwise", "grouped", "hidden"}
    assert controlled("dan-diagonal") == {"stem", "depthwise", "grouped", "plain", "hidden"}


def test_autocast_does_not_round_the_weights_that_a_controller_gives():
    base = tiny_base()
    domain = pm.new_domain(base, "dan", None)
    exact = domain.weights(base)
    with torch.autocast("cpu", torch.bfloat16):
        cast = domain.weights(base)
    assert all(torch.equal(cast[name], tensor) for name, tensor in exact.items())
    assert cast["stem.weight"].dtype == torch.float32


@pytest.mark.parametrize(("options", "numbers", "params"), [({"always": True}, 774_400, 2.19), ({}, 688_384, 2.06)])
def test_controllers_of_ten_domains_take_what_the_literature_counts(options, numbers, params):
    base = pm.load_base("decathlon-wrn28", pretrained=False, device="meta")
    account = pm.account(base, pm.create_method("dan", **options), domains=10)
    assert account.components["weights"] == numbers * 32
    assert account.components["norm_affine"] == account.components["bias"] == 0
    assert round(account.params_paper, 2) == params


@pytest.mark.parametrize("name", ["torchvision:resnet50", "efficientnet-lite0"])
def test_no_controller_costs_more_than_the_layer_so_dan_stays_below_fine_tuning(name):
    base = pm.load_base(name, pretrained=False, device="meta")
    for site, controller in skeleton(base, pm.create_method("dan"), None).named_transforms():
        assert controller.controller.numel() < base.sites[site].numel
    own, everywhere, whole = (
        pm.account(base, method, domains=6).params_paper for method in ("dan", Dan(always=True), "finetune")
    )
    assert own < 1.6 < whole < everywhere


def test_a_diagonal_controller_counts_as_one_scalar_per_output_channel():
    base = pm.load_base("decathlon-wrn28", pretrained=False, device="meta")
    account = pm.account(base, "dan-diagonal")
    assert account.components["scalars"] == 4_048 * 32
    assert account.components["weights"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"controller": "low-rank"}, "controller='low-rank' is not one of linear, diagonal"),
        ({"start": "zero"}, "start='zero' is not one of original, identity"),
        ({"always": "yes"}, "always='yes' must be true or false"),
    ],
)
def test_a_senseless_option_of_a_controller_is_refused_by_name(options, message):
    with pytest.raises(pm.MethodError, match=message):
        pm.create_method("dan", **options)
