"""Series adapters: both forms against ordinary layers, where they go, their start and cost."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymask as pm
from nets import SPEC, batch, tiny_base, tiny_net
from polymask.core.survey import Site
from polymask.methods.series_adapter import SeriesAdapter
from polymask.train.descent import learned_by
from polymask.train.fit import fit
from polymask.train.recipe import Recipe
from short_training import TRAIN, VAL

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
RECIPE = Recipe(epochs=12, rate=3e-3, head_rate=1e-2, drops=(), batch_size=8)


def adapted_layer(dims=2, groups=1, bias=True):
    """A convolution as a base, a domain on it, and its adapter as the layers BN and A."""
    torch.manual_seed(0)
    layer = CONV[dims](4, 8, 3, 2, 1, groups=groups, bias=bias).double()
    shape = (4, *[9, 8, 7][:dims])
    base = pm.load_base(layer, input=pm.InputSpec(shape, (0.5,) * 4, (0.5,) * 4))
    domain = pm.new_domain(base, "series-adapter", None)
    norm = NORM[dims](8).double()
    one = CONV[dims](8, 8, 1, groups=groups, bias=False).double()
    adapter = dict(domain.named_transforms())["weight"]
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            tensor.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        for mine, its in (
            (adapter.scale, norm.weight),
            (adapter.shift, norm.bias),
            (adapter.running_mean, norm.running_mean),
            (adapter.running_var, norm.running_var),
            (one.weight, adapter.adapter.reshape(one.weight.shape)),
        ):
            mine.copy_(its)
    images = torch.randn(3, *shape, dtype=torch.float64)
    return base, domain, nn.ModuleList([layer, norm, one]), images


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_in_eval_mode_the_layers_fold_into_a_kernel_and_a_bias(dims, groups, bias):
    base, domain, layers, images = adapted_layer(dims, groups, bias)
    layer, norm, one = layers.eval()
    y = layer(images)
    expected = y + one(norm(y))
    torch.testing.assert_close(domain.eval()(base, images), expected, rtol=0, atol=1e-12)
    weights = domain.weights(base)
    assert weights["weight"].shape == layer.weight.shape
    assert weights["bias"].shape == (8,)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_in_training_mode_outputs_gradients_and_statistics_are_those_of_the_layers(groups, bias):
    base, domain, layers, images = adapted_layer(2, groups, bias)
    layer, norm, one = layers.train()
    adapter = dict(domain.named_transforms())["weight"]
    y = layer(images)
    expected = y + one(norm(y))
    found = domain.train()(base, images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    G = torch.randn_like(found)
    (found * G).sum().backward()
    (expected * G).sum().backward()
    for mine, its in (
        (adapter.adapter.grad.reshape(one.weight.shape), one.weight.grad),
        (adapter.scale.grad, norm.weight.grad),
        (adapter.shift.grad, norm.bias.grad),
        (adapter.running_mean, norm.running_mean),
        (adapter.running_var, norm.running_var),
    ):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-11)
    base.verify()


def test_statistics_follow_with_the_methods_momentum():
    base = tiny_base()
    domains = [pm.new_domain(base, "series-adapter", None, norm_momentum=m).train() for m in (None, 0.5)]
    for domain in domains:
        domain(base, batch()[0])
    slow, fast = (dict(d.named_transforms())["stem.weight"].running_mean for d in domains)
    torch.testing.assert_close(5 * slow, fast)


@pytest.mark.parametrize("shape", [(6,), (5, 6)])
def test_after_a_linear_layer_the_norm_is_over_its_features(shape):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Flatten()).double()
    base = pm.load_base(net, input=pm.InputSpec(shape, (0.5,) * shape[0], (0.5,) * shape[0]))
    domain = pm.new_domain(base, "series-adapter", None, sites="all")
    adapter = dict(domain.named_transforms())["0.weight"]
    norm = nn.BatchNorm1d(4).double()
    images = torch.randn(7, *shape, dtype=torch.float64)
    for mode in (True, False):
        norm.train(mode)
        domain.train(mode)
        y = net[0](images)
        normed = norm(y.reshape(-1, 4)).view_as(y)
        expected = net[1:](y + normed @ adapter.adapter[0].T)
        torch.testing.assert_close(domain(base, images), expected, rtol=0, atol=1e-12)


def test_adapters_go_after_the_layers_that_are_asked_for():
    base = tiny_base()
    found = {
        sites: {n for n, _ in pm.new_domain(base, "series-adapter", sites=sites).named_transforms()}
        for sites in ("spatial", "conv", "all")
    }
    spatial = {"stem.weight", "depthwise.weight", "grouped.weight"}
    assert found["spatial"] == spatial
    assert found["conv"] == spatial | {"plain.weight"}
    assert found["all"] == set(base.sites)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("up.weight", "conv_transpose2d"), ("mix.kernel", "conv2d"), ("a.in_proj_weight", "linear")],
)
def test_what_no_adapter_can_follow_is_left_alone(name, kind):
    site = Site(name, (4, 4, 3, 3), kind, 1, "bias", False, None, False, torch.float32)
    assert SeriesAdapter(sites="all").transform(site) is None


def test_no_adapter_goes_where_the_layers_output_is_not_what_the_weight_makes():
    site = Site("conv.weight", (4, 4, 3, 3), "conv2d", 1, "conv.bias", False, None, False, torch.float32)
    assert SeriesAdapter().transform(site) is not None
    assert SeriesAdapter().transform(dataclasses.replace(site, own_output=False)) is None


def test_blocks_keep_the_groups_of_a_convolution_apart():
    base = tiny_base()
    shapes = {
        name: tuple(t.adapter.shape)
        for name, t in pm.new_domain(base, "series-adapter", sites="conv").named_transforms()
    }
    assert shapes == {
        "stem.weight": (1, 8, 8),
        "depthwise.weight": (8, 1, 1),
        "grouped.weight": (4, 4, 4),
        "plain.weight": (1, 16, 16),
    }


def test_adapters_start_with_the_variance_of_the_original_code():
    torch.manual_seed(0)
    shape = (256, 16, 3, 3)
    site = Site("c.weight", shape, "conv2d", 1, "c.bias", False, None, False, torch.float32)
    adapter = SeriesAdapter(start="he").transform(site)
    assert abs(adapter.adapter.std().item() / (2 / 256) ** 0.5 - 1) < 0.02
    assert torch.equal(adapter.scale, torch.ones(256))
    assert torch.equal(adapter.running_var, torch.ones(256))
    assert not adapter.shift.any()
    assert not adapter.running_mean.any()


def test_a_new_domain_reproduces_the_bases_features():
    base = tiny_base()
    images, _ = batch()
    zero = pm.new_domain(base, "series-adapter", ["a", "b"]).eval()
    drawn = pm.new_domain(base, "series-adapter", ["a", "b"], start="he").eval()
    with torch.no_grad():
        assert torch.equal(zero.features(base, images), base.net(images))
        assert not torch.allclose(drawn.features(base, images), base.net(images), atol=1e-3)


def test_decay_adds_half_its_share_of_the_squares_of_the_adapters():
    base = tiny_base()
    domain = pm.new_domain(base, "series-adapter", ["a", "b"], decay=0.3)
    adapters = [t.adapter for _, t in domain.named_transforms()]
    objective = domain.method.objective(base, domain, lambda: iter(()))
    penalty = objective(torch.zeros(1), torch.zeros(1))
    expected = 0.15 * sum(float(a.detach().double().square().sum()) for a in adapters)
    assert abs(penalty.item() - expected) < 1e-4
    penalty.backward()
    for adapter in adapters:
        torch.testing.assert_close(adapter.grad, 0.3 * adapter.detach())
    assert not list(objective.parameters())
    assert len(learned_by([domain], [objective])["head"]) == 2
    plain = pm.new_domain(base, "series-adapter", ["a", "b"])
    assert plain.method.objective(base, plain, lambda: iter(())) is None
    assert pm.create_method("series-adapter-decay").decay == 0.002


def test_decay_makes_adapters_smaller():
    base = tiny_base()
    sizes = []
    for decay in (0.0, 0.5):
        torch.manual_seed(0)
        domain = pm.new_domain(base, "series-adapter", ["a", "b", "c"], decay=decay)
        fit(base, domain, TRAIN, VAL, dataclasses.replace(RECIPE, selection="last"))
        sizes.append(sum(t.adapter.norm() for _, t in domain.named_transforms()))
    assert sizes[1] < 0.9 * sizes[0]


@pytest.mark.parametrize("norms", ["own", "affine"])
@pytest.mark.parametrize("start", ["he", "zero"])
def test_adapters_learn_a_domain(start, norms):
    base = tiny_base()
    torch.manual_seed(0)
    options = {"start": start, "norms": norms, "sites": "conv"}
    domain = pm.new_domain(base, "series-adapter", ["a", "b", "c"], **options)
    history = fit(base, domain, TRAIN, VAL, dataclasses.replace(RECIPE, epochs=40))
    assert history[-1].loss < history[0].loss - 0.5
    assert history[-1].val_accuracy > 90
    base.verify()


def test_a_network_without_norms_can_be_adapted():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip
    base = pm.load_base(net, input=SPEC)
    domain = pm.new_domain(base, "series-adapter", ["a", "b", "c"])
    history = fit(base, domain, TRAIN, VAL, RECIPE)
    assert history[-1].loss < history[0].loss
    images, _ = batch()
    with torch.no_grad():
        assert torch.equal(domain.merged(base)(images), domain(base, images))


def test_adapters_of_a_half_precision_base_are_learned_in_single_precision():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, bias=False), nn.Flatten()).bfloat16()
    base = pm.load_base(net, input=SPEC)
    domain = pm.new_domain(base, "series-adapter", None)
    weights = domain.eval().weights(base)
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    features = domain.train()(base, torch.randn(2, *SPEC.shape, dtype=torch.bfloat16))
    assert features.dtype == torch.bfloat16
    features.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in domain.parameters())


def test_a_double_precision_base_is_learned_in_double_precision():
    base = pm.load_base(tiny_net().double(), input=SPEC)
    domain = pm.new_domain(base, "series-adapter", ["a", "b", "c"]).train()
    images, labels = batch()
    F.cross_entropy(domain(base, images.double()), labels).backward()
    assert all(p.grad.dtype == torch.float64 for p in domain.parameters())


def test_ten_domains_take_twice_the_base_as_the_literature_counts():
    base = pm.load_base("decathlon-resnet26", pretrained=False, device="meta")
    account = pm.account(base, "series-adapter", domains=10)
    assert account.components["weights"] == 689_152 * 32
    # Two norms after each of 25 convolutions, and the one at the end.
    assert account.components["norm_affine"] == 2 * (2 * 3_616 + 256) * 32
    assert account.components["norm_statistics"] == account.components["norm_affine"]
    assert account.components["bias"] == 0
    assert round(account.params_paper, 2) == 2.09


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sites": "linear"}, "sites='linear' is not one of spatial, conv, all"),
        ({"start": "identity"}, "start='identity' is not one of he, zero"),
        ({"decay": -1.0}, r"decay=-1\.0 must be a number from 0 to 1"),
        ({"decay": "much"}, "decay='much' must be a number from 0 to 1"),
        ({"rank": 3}, "no option 'rank'"),
    ],
)
def test_a_senseless_option_of_series_adapters_is_refused_by_name(options, message):
    with pytest.raises(pm.MethodError, match=message):
        pm.create_method("series-adapter", **options)
