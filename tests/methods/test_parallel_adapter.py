"""Parallel adapters: the folded kernel, the sites they go to, their start and their cost."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymask as pm
from nets import SPEC, batch, tiny_base
from polymask.core.survey import Site
from polymask.methods.parallel_adapter import ParallelAdapter

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
LAYER = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def site_of(layer: nn.Module, kind: str) -> Site:
    groups = getattr(layer, "groups", 1)
    weight, has_bias = layer.weight, layer.bias is not None
    shape = tuple(weight.shape)
    return Site("weight", shape, kind, groups, "bias", has_bias, None, False, weight.dtype)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dilation", [1, 2])
def test_the_kernel_is_the_convolution_plus_a_1x1_one_at_its_stride(dims, stride, groups, dilation):
    torch.manual_seed(0)
    layer = LAYER[dims](4, 8, 3, stride, dilation, dilation, groups).double()
    adapted = ParallelAdapter().transform(site_of(layer, f"conv{dims}d"))
    A, ones = adapted.adapter, (1,) * dims
    assert A.shape == (8, 4 // groups)
    x = torch.randn(2, 4, *[9, 8, 7][:dims], dtype=torch.float64)

    options = (layer.bias, stride, dilation, dilation, groups)
    y = CONV[dims](x, adapted.weight(layer.weight), *options)

    expected = layer(x) + CONV[dims](x, A.view(*A.shape, *ones), None, stride, groups=groups)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [(1, 3), (5, 3), (7, 1)])
def test_a_kernel_need_not_be_square(kernel):
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 5, kernel, padding="same", bias=False).double()
    adapted = ParallelAdapter().transform(site_of(layer, "conv2d"))
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    y = F.conv2d(x, adapted.weight(layer.weight), padding="same")
    expected = layer(x) + F.conv2d(x, adapted.adapter[:, :, None, None])
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_beside_a_transposed_convolution_it_is_a_transposed_1x1_one(stride, groups):
    torch.manual_seed(0)
    extra = stride - 1
    layer = nn.ConvTranspose2d(4, 6, 3, stride, 1, extra, groups, bias=False).double()
    adapted = ParallelAdapter().transform(site_of(layer, "conv_transpose2d"))
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    y = F.conv_transpose2d(x, adapted.weight(layer.weight), None, stride, 1, extra, groups)
    A = adapted.adapter[:, :, None, None]
    expected = layer(x) + F.conv_transpose2d(x, A, None, stride, 0, extra, groups)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


def test_only_kernels_larger_than_one_pixel_are_adapted_unless_all_are_asked_for():
    base = tiny_base()
    spatial, everywhere = (
        dict(pm.new_domain(base, "parallel-adapter", None, sites=sites).named_transforms())
        for sites in ("spatial", "all")
    )
    assert set(spatial) == {"stem.weight", "depthwise.weight", "grouped.weight"}
    assert set(everywhere) == set(base.sites)
    assert everywhere["hidden.weight"].adapter.shape == base.sites["hidden.weight"].shape
    assert everywhere["plain.weight"].adapter.shape == (16, 16)
    W = base.tensor("hidden.weight")
    expected = W + everywhere["hidden.weight"].adapter
    assert torch.equal(everywhere["hidden.weight"].weight(W), expected)


@pytest.mark.parametrize("sites", ["spatial", "all"])
@pytest.mark.parametrize("kernel", [2, (3, 2), 16])
def test_a_kernel_without_a_centre_is_left_alone(sites, kernel):
    layer = nn.Conv2d(3, 4, kernel)
    assert ParallelAdapter(sites=sites).transform(site_of(layer, "conv2d")) is None


def test_adapters_start_with_the_variance_of_the_original_code():
    torch.manual_seed(0)
    layer = nn.Conv2d(256, 128, 3)
    A = ParallelAdapter(start="he").transform(site_of(layer, "conv2d")).adapter
    assert abs(A.std().item() / (2 / 128) ** 0.5 - 1) < 0.02
    assert abs(A.mean().item()) < 0.002


def test_a_new_domain_reproduces_the_bases_features_bit_for_bit():
    base = tiny_base()
    images, _ = batch()
    zero = pm.new_domain(base, "parallel-adapter", ["a", "b"]).eval()
    drawn = pm.new_domain(base, "parallel-adapter", ["a", "b"], start="he").eval()
    with torch.no_grad():
        assert torch.equal(zero.features(base, images), base.net(images))
        assert not torch.equal(drawn.features(base, images), base.net(images))


def test_adapters_of_a_half_precision_base_are_learned_in_single_precision():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).bfloat16()
    base = pm.load_base(net, input=SPEC)
    domain = pm.new_domain(base, "parallel-adapter", None)
    weights = domain.weights(base)
    assert weights["0.weight"].dtype == torch.bfloat16
    weights["0.weight"].float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in domain.transforms.parameters())


def test_ten_domains_take_twice_the_base_as_the_literature_counts():
    base = pm.load_base("decathlon-resnet26", pretrained=False, device="meta")
    account = pm.account(base, "parallel-adapter", domains=10)
    assert account.components["weights"] == 645_216 * 32
    assert account.components["norm_affine"] == 2 * 3_872 * 32
    assert round(account.params_paper, 3) == 2.011


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sites": "conv"}, "sites='conv' is not one of spatial, all"),
        ({"start": "ones"}, "start='ones' is not one of he, zero, identity"),
        ({"init": 0.1}, "no option 'init'"),
    ],
)
def test_a_senseless_option_of_adapters_is_refused_by_name(options, message):
    with pytest.raises(pm.MethodError, match=message):
        pm.create_method("parallel-adapter", **options)
