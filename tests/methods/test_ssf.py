"""SSF: scales and shifts after every layer, folded into it."""

import pytest
import torch
from torch import nn

import polymask as pm
from nets import SPEC, batch, tiny_base
from polymask.core.survey import Site
from polymask.methods.ssf import Ssf


def scale_shift(layer: nn.Module, kind: str):
    weight, groups = layer.weight, getattr(layer, "groups", 1)
    has_bias = layer.bias is not None
    site = Site("weight", tuple(weight.shape), kind, groups, "bias", has_bias, None, False, weight.dtype)
    return Ssf(spread=1.0).transform(site)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv2d", "conv_transpose2d"])
def test_the_folded_layer_gives_the_scaled_and_shifted_outputs(kind, bias):
    torch.manual_seed(0)
    layer, x = {
        "linear": lambda: (nn.Linear(4, 6, bias=bias), torch.randn(3, 4)),
        "conv2d": lambda: (nn.Conv2d(4, 6, 3, groups=2, bias=bias), torch.randn(2, 4, 7, 7)),
        "conv_transpose2d": lambda: (nn.ConvTranspose2d(4, 6, 3, 2, groups=2, bias=bias), torch.randn(2, 4, 5, 5)),
    }[kind]()
    layer, x = layer.double(), x.double()
    transform = scale_shift(layer, kind)
    ones = (6,) if kind == "linear" else (6, 1, 1)
    expected = layer(x) * (1 + transform.gain).view(ones) + transform.shift.view(ones)
    folded = {"weight": transform.weight(layer.weight), "bias": transform.bias(layer.bias)}
    torch.testing.assert_close(torch.func.functional_call(layer, folded, (x,)), expected)


def test_a_network_folds_what_acts_after_its_layers():
    torch.manual_seed(0)
    base = tiny_base()
    domain = pm.new_domain(base, "ssf", None, spread=0.3).eval()
    images = batch()[0]
    transforms = dict(domain.named_transforms())

    def after(transform):
        def hook(module, inputs, output):
            ones = (-1,) + (1,) * (output.ndim - 2)
            return output * (1 + transform.gain).view(ones) + transform.shift.view(ones)

        return hook

    hooks = {name.removesuffix(".weight"): after(transform) for name, transform in transforms.items()}
    with torch.no_grad(), base.hooked(hooks):
        expected = base.net(images)
    with torch.no_grad():
        torch.testing.assert_close(domain.features(base, images), expected)
        torch.testing.assert_close(domain.merged(base)(images), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fresh_weights_are_the_bases_and_a_layer_without_a_bias_gets_zeros(dtype):
    base = pm.load_base(tiny_base().net.to(dtype), input=SPEC)
    for name, tensor in pm.new_domain(base, "ssf", None).weights(base).items():
        if name in ("stem.bias", "depthwise.bias", "grouped.bias"):
            assert not tensor.any()
            assert tensor.dtype == dtype
        else:
            assert torch.equal(tensor, base.tensor(name).to(tensor.dtype))


def test_separate_projections_that_share_a_bias_get_scales_alone():
    site = Site("q_proj_weight", (6, 4), "in_projection", 1, "in_proj_bias", False, None, False, torch.float32)
    transform = Ssf().transform(site)
    assert set(transform.stored()) == {"gain"}
    assert transform.bias(None) is None


def test_a_domain_takes_two_numbers_for_every_output_channel():
    base = pm.load_base("decathlon-resnet26", pretrained=False, device="meta")
    bits, channels = pm.account(base, "ssf").components, sum(site.channels for site in base.sites.values())
    assert (bits["scalars"], bits["bias"]) == (32 * channels, 32 * channels)


def test_a_senseless_spread_is_refused_by_name():
    with pytest.raises(pm.MethodError, match="spread=-1"):
        pm.create_method("ssf", spread=-1)
