"""LoRA and DoRA: the update's form, its rank, its start and its cost."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymask as pm
from nets import SPEC, batch, tiny_base, trained
from polymask.core.survey import Site
from polymask.methods.lora import Dora, Lora

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
LAYER = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def random_update(layer: nn.Module, kind: str, **options):
    """A transform whose A and B are both drawn from N(0, 1)."""
    weight, groups = layer.weight, getattr(layer, "groups", 1)
    shape = tuple(weight.shape)
    site = Site("weight", shape, kind, groups, "bias", False, None, False, weight.dtype)
    transform = Lora(**options).transform(site)
    nn.init.normal_(transform.A)
    nn.init.normal_(transform.B)
    return transform


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_update_is_a_convolution_by_a_and_a_1x1_one_by_b(dims, groups):
    torch.manual_seed(0)
    layer = LAYER[dims](4, 8, 3, 2, 1, groups=groups, bias=False).double()
    transform = random_update(layer, f"conv{dims}d", rank=2, alpha=3)
    x = torch.randn(2, 4, *[9, 8, 7][:dims], dtype=torch.float64)

    y = CONV[dims](x, transform.weight(layer.weight), None, 2, 1, groups=groups)

    A = transform.A.view(2, 4 // groups, *(3,) * dims)  # the same one for every group
    B = transform.B.view(8, 2, *(1,) * dims)
    parts = [
        CONV[dims](CONV[dims](own_inputs, A, None, 2, 1), own_rows)
        for own_inputs, own_rows in zip(x.chunk(groups, 1), B.chunk(groups), strict=True)
    ]
    expected = layer(x) + 3 / 2 * torch.cat(parts, 1)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_update_of_a_transposed_convolution_is_one_by_a_and_a_1x1_one_by_b(groups):
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(4, 6, 3, 2, groups=groups, bias=False).double()
    transform = random_update(layer, "conv_transpose2d", rank=2, alpha=3)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    y = F.conv_transpose2d(x, transform.weight(layer.weight), None, 2, groups=groups)
    A = transform.A.view(2, 4 // groups, 3, 3).transpose(0, 1)
    B = transform.B.view(6, 2, 1, 1)
    parts = [
        F.conv2d(F.conv_transpose2d(own_inputs, A, None, 2), own_rows)
        for own_inputs, own_rows in zip(x.chunk(groups, 1), B.chunk(groups), strict=True)
    ]
    expected = layer(x) + 3 / 2 * torch.cat(parts, 1)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["linear", "in_projection"])
def test_the_update_of_a_linear_layer_is_b_after_a(kind):
    torch.manual_seed(0)
    layer = nn.Linear(4, 12, bias=False).double()
    transform = random_update(layer, kind, rank=2, alpha=1)
    x = torch.randn(3, 4, dtype=torch.float64)
    y = F.linear(x, transform.weight(layer.weight))
    expected = layer(x) + F.linear(F.linear(x, transform.A), transform.B) / 2
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_the_update_of_a_trained_domain_has_no_more_than_its_rank(rank):
    base = tiny_base()
    domain = trained(base, "lora", rank=rank)
    for name, transform in domain.named_transforms():
        W = base.tensor(name)
        update = (transform.weight(W) - W).detach().flatten(1).double()
        size = torch.linalg.svdvals(update)
        assert size[0] > 0
        assert (size[rank:] < 1e-4 * size[0]).all()  # what rounding W~ to float32 leaves


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_fresh_domain_is_the_base_bit_for_bit(dtype):
    base = pm.load_base(tiny_base().net.to(dtype), input=SPEC)
    images = batch()[0].to(dtype)
    domain = pm.new_domain(base, "lora", None).eval()
    with torch.no_grad():
        assert all(torch.equal(t, base.tensor(n)) for n, t in domain.weights(base).items())
        assert torch.equal(domain.features(base, images), base.net(images))


def test_a_starts_in_kaimings_range_and_b_at_zero():
    torch.manual_seed(0)
    base = tiny_base()
    for _, transform in pm.new_domain(base, "lora", None).named_transforms():
        bound = 1 / math.sqrt(transform.A.shape[1])
        assert 0.8 * bound < transform.A.abs().max() <= bound
        assert not transform.B.any()


def test_the_rank_is_no_more_than_a_site_has_rows_or_columns():
    base = tiny_base()
    domain = pm.new_domain(base, "lora", None, rank=100)
    ranks = {name: t.A.shape[0] for name, t in domain.named_transforms()}
    assert ranks == {
        "stem.weight": 8,  # 8 x 27
        "depthwise.weight": 8,  # 8 x 9
        "grouped.weight": 16,  # 16 x 18
        "plain.weight": 16,  # 16 x 16
        "hidden.weight": 12,  # 12 x 16
    }


def test_the_factor_is_alpha_over_the_rank_that_was_asked_for():
    torch.manual_seed(0)
    layer = nn.Linear(3, 5).double()
    transform = random_update(layer, "linear", rank=10, alpha=5)
    update = transform.weight(layer.weight) - layer.weight
    assert transform.A.shape == (3, 3)
    torch.testing.assert_close(update, 0.5 * transform.B @ transform.A)


def test_autocast_does_not_round_the_weights_that_an_update_gives():
    base = tiny_base()
    domain = trained(base, "lora")
    exact = domain.weights(base)
    with torch.autocast("cpu", torch.bfloat16):
        cast = domain.weights(base)
    assert all(torch.equal(cast[name], tensor) for name, tensor in exact.items())


@pytest.mark.parametrize("rank", [4, 8])
def test_a_domain_takes_rank_times_the_rows_and_columns_of_every_site(rank):
    base = pm.load_base("decathlon-resnet26", pretrained=False, device="meta")
    account = pm.account(base, pm.create_method("lora", rank=rank))
    stem, first = 27 + 32, (9 * 32 + 64) + (9 * 64 + 128) + (9 * 128 + 256)
    others = sum(7 * (9 * width + width) for width in (64, 128, 256))
    assert account.components["weights"] == rank * (stem + first + others) * 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0 must be a whole number from 1 to 65536"),
        ({"rank": 2.0}, r"rank=2\.0 must be a whole number"),
        ({"rank": True}, "rank=True must be a whole number"),
        ({"alpha": 0}, "alpha=0 must be a positive number"),
        ({"alpha": math.inf}, "alpha=inf must be a number from -1e.09 to 1e.09"),
        ({"alpha": math.nan}, "alpha=nan must be a number from -1e.09 to 1e.09"),
        ({"alpha": "8"}, "alpha='8' must be a positive number"),
    ],
)
def test_a_senseless_option_of_an_update_is_refused_by_name(options, message):
    with pytest.raises(pm.MethodError, match=message):
        pm.create_method("lora", **options)


def sized_update(layer: nn.Module, kind: str, **options):
    """A DoRA transform with random A, B and m."""
    weight, groups = layer.weight, getattr(layer, "groups", 1)
    site = Site("weight", tuple(weight.shape), kind, groups, "bias", False, None, False, weight.dtype)
    transform = Dora(**options).transform(site)
    transform.begin(weight.detach())
    for parameter in transform.parameters():
        nn.init.normal_(parameter)
    return transform


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.Linear(5, 6), "linear"),
        (nn.Conv2d(4, 6, 3), "conv2d"),
        (nn.Conv2d(4, 6, 3, groups=2), "conv2d"),
        (nn.Conv1d(4, 6, 3), "conv1d"),
    ],
)
def test_dora_gives_every_row_its_own_length_and_loras_direction(layer, kind):
    torch.manual_seed(0)
    layer = layer.double()
    transform = sized_update(layer, kind, rank=2, alpha=3)
    W = layer.weight.detach()
    found = transform.weight(W).detach().flatten(1)
    for row, w in enumerate(W.flatten(1)):
        v = w + 3 / 2 * sum(transform.B[row, r] * transform.A[r] for r in range(2)).detach()
        torch.testing.assert_close(found[row], transform.magnitude[row].item() * v / math.sqrt(v @ v))


def test_dora_of_a_transposed_convolution_sizes_output_channels():
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(4, 6, 3, groups=2).double()
    transform = sized_update(layer, "conv_transpose2d", rank=2)
    found = transform.weight(layer.weight.detach()).detach()  # (4, 3, 3, 3)
    for channel in range(6):
        group, own = divmod(channel, 3)
        length = found[2 * group : 2 * group + 2, own].norm()
        torch.testing.assert_close(length, transform.magnitude[channel].detach().abs())


def test_the_gradient_of_dora_takes_the_norm_for_a_constant():
    torch.manual_seed(0)
    layer = nn.Linear(5, 6).double()
    transform = sized_update(layer, "linear", rank=2, alpha=2)
    W, G = layer.weight.detach(), torch.randn(6, 5, dtype=torch.float64)
    (transform.weight(W) * G).sum().backward()
    V = (W + transform.B @ transform.A).detach()
    norms = V.norm(dim=1, keepdim=True)
    scaled = transform.magnitude.detach()[:, None] / norms * G
    torch.testing.assert_close(transform.magnitude.grad, (G * V / norms).sum(1))
    torch.testing.assert_close(transform.B.grad, scaled @ transform.A.detach().T)
    torch.testing.assert_close(transform.A.grad, transform.B.detach().T @ scaled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_fresh_dora_domain_is_the_base_bit_for_bit_even_where_a_filter_is_zero(dtype):
    net = tiny_base().net.to(dtype)
    with torch.no_grad():
        net.stem.weight[0] = 0
    base = pm.load_base(net, input=SPEC)
    domain = pm.new_domain(base, "dora", None).eval()
    with torch.no_grad():
        assert all(torch.equal(t, base.tensor(n)) for n, t in domain.weights(base).items())


def test_dora_takes_what_lora_takes_and_a_number_for_every_output_channel():
    base = pm.load_base("decathlon-resnet26", pretrained=False, device="meta")
    lora, dora = (pm.account(base, method).components for method in ("lora", "dora"))
    assert dora["weights"] == lora["weights"]
    assert dora["scalars"] == 32 * sum(site.channels for site in base.sites.values())


def test_a_pack_of_lora_conv_is_one_of_lora_under_its_earlier_name(tmp_path):
    base = tiny_base()
    domain = trained(base, "lora-conv", rank=2)
    domain.save(tmp_path / "a.safetensors")
    loaded = pm.load_domain(tmp_path / "a.safetensors", base)
    assert loaded.method.name == "lora-conv"
    assert loaded.method.options() == pm.create_method("lora", rank=2).options()
