"""MTAN: its attention by an independent computation, what is shared, the cost."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polymask as pm
from nets import SPEC, batch, block_base, block_net, logits, train
from polymask.core.accounting import account, component_bits
from polymask.core.network import put_tensors
from polymask.train.fit_all import Lesson, fit_all
from polymask.train.recipe import Recipe
from short_training import Fixed

RECIPE = Recipe(epochs=6, rate=3e-3, weight_rate=1e-3, head_rate=3e-2, drops=(), batch_size=8)


def double_base() -> pm.Base:
    return pm.load_base(block_net().double(), input=SPEC)


def worn_domain(base: pm.Base, classes=("a", "b"), seed: int = 1) -> pm.Domain:
    """A domain of which every tensor is something else than at the start."""
    torch.manual_seed(seed)
    domain = pm.new_domain(base, "mtan", list(classes))
    with torch.no_grad():
        for name, tensor in [*domain.named_parameters(), *domain.named_buffers()]:
            if "running_var" in name:
                tensor.uniform_(0.5, 1.5)
            elif tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn_like(tensor))
    return domain.eval()


def norm(state: dict[str, Tensor], name: str, x: Tensor, training: bool) -> Tensor:
    mean, var = state[f"{name}.running_mean"], state[f"{name}.running_var"]
    if training:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    shape = (1, -1, 1, 1)
    x = (x - mean.view(shape)) / (var.view(shape) + 1e-5).sqrt()
    return x * state[f"{name}.weight"].view(shape) + state[f"{name}.bias"].view(shape)


def independent(base: pm.Base, domain: pm.Domain, images: Tensor, training: bool) -> Tensor:
    """Features by the formulas, on an ordinary copy of the network."""
    net = block_net().double().train(training)
    put_tensors(net, {n: t.clone() for n, t in domain.weights(base).items()})
    g = [F.relu(net.stem_bn(net.stem(images)))]
    for stage in net.stages:
        g.append(stage(g[-1]))
    state = {n: t.clone() for n, t in domain.route.attention.state_dict().items()}
    f = None
    for j, map_ in enumerate(g):
        seen = map_ if f is None else torch.cat([map_, f], 1)
        y = torch.einsum("oi,nihw->nohw", state[f"{j}.mask.0.weight"][:, :, 0, 0], seen)
        y = norm(state, f"{j}.mask.1", y, training).clamp_min(0)
        y = torch.einsum("oi,nihw->nohw", state[f"{j}.mask.3.weight"][:, :, 0, 0], y)
        mask = 1 / (1 + torch.exp(-norm(state, f"{j}.mask.4", y, training)))
        f = F.conv2d(mask * map_, state[f"{j}.shared.0.weight"], padding=1)
        f = norm(state, f"{j}.shared.1", f, training).clamp_min(0)
        if j in (1, 2):  # the stem and the first stage have one resolution
            f = F.max_pool2d(f, 2)
    return f.mean((2, 3))


@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_features_are_those_of_the_formulas(training):
    base = double_base()
    domain = worn_domain(base)
    images = batch()[0].double()
    expected = independent(base, domain, images, training)
    found = domain.train(training).features(base, images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    assert found.shape == (8, base.feature_dim)


def test_domains_share_the_network_and_the_3x3_convolutions_and_nothing_else():
    base = block_base()
    first, second = (worn_domain(base, seed=seed) for seed in (1, 2))
    pm.create_method("mtan").tie([first, second])
    its = dict(first.named_parameters())
    shared = {name for name, p in second.named_parameters() if p is its[name]}
    expected = {
        name for name in its if name.startswith("transforms.") or (".shared." in name and name.startswith("route."))
    }
    assert shared == expected
    assert len(shared) == 11 + 4 * 3  # sites; a convolution, a scale and a shift at four places
    buffers = {t.data_ptr() for t in first.buffers() if t.ndim}
    assert not any(t.data_ptr() in buffers for t in second.buffers() if t.ndim)


def test_a_step_for_one_domain_moves_what_both_share_and_nothing_of_the_others_own():
    base = block_base()
    first, second = (worn_domain(base, ("a", "b", "c"), seed) for seed in (1, 2))
    pm.create_method("mtan").tie([first, second])
    before = {name: t.clone() for name, t in second.state_dict().items()}
    tied = {n for n, p in second.named_parameters() if p is dict(first.named_parameters())[n]}
    train(base, first)
    moved = {name for name, t in second.state_dict().items() if not torch.equal(t, before[name])}
    assert moved == tied
    base.verify()


@pytest.fixture(scope="module")
def fitted():
    base = block_base()
    lessons = {
        name: Lesson(["a", "b", "c"], Fixed(4, offset), Fixed(1, offset + 99))
        for name, offset in (("one", 0), ("two", 10))
    }
    return base, fit_all(base, lessons, "mtan", RECIPE, norms="own")


def test_domains_that_learn_together_learn(fitted):
    base, found = fitted
    for name, history in found.histories.items():
        assert history[-1].loss < history[0].loss / 2
        assert found.final[name] > 90
    base.verify()


def test_learned_domains_agree_in_what_they_share_and_each_stands_alone(fitted, tmp_path):
    base, found = fitted
    one, two = (found.domains[name] for name in ("one", "two"))
    for (_, its), (_, other) in zip(one.named_transforms(), two.named_transforms(), strict=True):
        assert torch.equal(its.delta, other.delta)
        assert its.delta.abs().max() > 0
    one.save(tmp_path / "one.safetensors")
    loaded = pm.load_domain(tmp_path / "one.safetensors", base)
    assert torch.equal(logits(base, loaded), logits(base, one))


def test_what_became_of_the_base_is_told(fitted):
    base, found = fitted
    domain = found.domains["one"]
    moved = domain.method.moved(base, list(found.domains.values()))
    assert moved.keys() == base.sites.keys()
    weights = domain.weights(base)
    assert all(torch.equal(moved[name], weights[name]) for name in moved)
    assert found.base.change > 0


def test_the_attention_has_the_size_of_the_published_one_without_its_idle_biases():
    base = pm.load_base("decathlon-wrn28", pretrained=False, device="meta")
    cost = account(base, "mtan", domains=10)
    # Published: 261,344 for each domain and 969,792 shared, with biases right before batch norms.
    assert cost.components["weights"] == 32 * (261_344 - 2 * (16 + 64 + 128 + 256))
    assert cost.components["shared"] == 32 * (969_792 - (64 + 128 + 256 + 256))
    assert cost.components["moved"] == 32 * 5_839_280
    # All ten domains have attention there, the base's own too, and one set of norms.
    ten = cost.components["shared"] + 10 * cost.components["weights"]
    assert 1 + ten / 32 / cost.base_parameters == pytest.approx(1.61, abs=0.005)
    assert cost.params_paper == pytest.approx(1.58, abs=0.005)  # nine of them, with own norms


def test_the_masks_are_at_the_stem_and_at_the_end_of_every_stage():
    base = block_base()
    route = pm.new_domain(base, "mtan", ["a"]).route
    assert (route.entry, route.ends) == ("stages.0.0", ("stages.0.0", "stages.1.1", "stages.2.0"))
    shapes = [tuple(a.shared[0].weight.shape[:2]) for a in route.attention]
    assert shapes == [(4, 4), (8, 4), (12, 8), (12, 12)]
    assert [a.mask[0].weight.shape[1] for a in route.attention] == [4, 8, 16, 24]


def test_a_network_whose_first_block_reads_the_images_writes_in_place_and_ends_in_vectors():
    torch.manual_seed(0)
    convs = [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    ]
    linear = [nn.Linear(24, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)]
    base = pm.load_base(nn.Sequential(*convs, *linear), input=SPEC)
    domain = pm.new_domain(base, "mtan", ["a", "b", "c"])
    assert domain.route.ends == ("0", "3")
    assert not domain.route.has_stem
    losses = train(base, domain, steps=30, rate=1e-2)
    assert min(losses[-5:]) < losses[0] - 0.1


def test_images_of_another_size_are_pooled_as_their_maps_need():
    base = block_base()
    domain = worn_domain(base)
    assert domain(base, torch.randn(2, 3, 21, 30)).shape == (2, 2)


def test_statistics_count_as_statistics_wherever_they_are():
    bits = component_bits(worn_domain(block_base()))
    attention = 2 * 2 * (4 + 4 + 8 + 12) + 2 * (4 + 8 + 12 + 12)  # means and variances
    base_norms = 2 * (4 + 4 + 4 + 8 + 8 + 8 + 8 + 8 + 12 + 12 + 12)
    assert bits["norm_statistics"] == 32 * (attention + base_norms)


@pytest.mark.parametrize("name", ["torchvision:vit_b_16", "torchvision:swin_t"])
def test_a_network_of_tokens_is_refused(name):
    base = pm.load_base(name, pretrained=False, device="meta")
    with pytest.raises(pm.BaseError, match="no chain of blocks that pass feature maps"):
        pm.new_domain(base, "mtan", None)
