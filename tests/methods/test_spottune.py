"""SpotTune: each copy alone, each image's choice, the policy's gradient, the cost."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polymask as pm
from nets import SPEC, batch, block_base, block_net, tiny_base, train
from polymask.core.accounting import account
from polymask.core.blocks import find_blocks
from polymask.core.network import named_tensors, put_tensors
from polymask.methods.spottune import Policy, SpotTune
from polymask.train.fit import fit
from polymask.train.recipe import Recipe
from short_training import Fixed


def double_base() -> pm.Base:
    return pm.load_base(block_net().double(), input=SPEC)


def double_images(count: int = 6) -> Tensor:
    return batch(count)[0].double()


def worn_domain(base: pm.Base, **options) -> pm.Domain:
    """A domain of which every tensor is something else than at the start."""
    torch.manual_seed(1)
    domain = pm.new_domain(base, "spottune", ["a", "b"], policy_width=2, **options)
    with torch.no_grad():
        for name, tensor in [*domain.named_parameters(), *domain.named_buffers()]:
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand_like(tensor)).abs_() if "running_var" in name else (
                    tensor.add_(0.1 * torch.randn_like(tensor))
                )
    return domain.eval()


def always(domain: pm.Domain, choice: int) -> None:
    """Let the policy choose the same for every image and block."""
    layer = domain.route.policy.logits
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor([0.0, 1000.0] if choice else [1000.0, 0.0]).repeat(4))


def plain_copies(base: pm.Base, domain: pm.Domain) -> tuple[nn.Module, nn.Module]:
    """Two ordinary networks: all blocks the base's with own norms, and all blocks fine-tuned.

    Outside the blocks both are the same.
    """
    tuned, original = block_net().double(), block_net().double()
    for net in (tuned, original):
        net.fc = nn.Identity()
        put_tensors(net, domain.weights(base))
    base_state = dict(named_tensors(base.net))
    norms = {
        f"{name}.{leaf}": tensor
        for name, own in zip(domain.route.norm_names, domain.route.norms, strict=True)
        for leaf, tensor in own.tensors().items()
    }
    put_tensors(
        original.stages,
        {
            name.removeprefix("stages."): norms.get(name, tensor)
            for name, tensor in base_state.items()
            if name.startswith("stages.")
        },
    )
    return original, tuned


@pytest.mark.parametrize("choice", [0, 1])
@pytest.mark.parametrize("training", [False, True])
@torch.no_grad()
def test_with_a_constant_policy_it_is_one_of_the_two_copies(choice, training):
    base = double_base()
    domain = worn_domain(base)
    always(domain, choice)
    net = plain_copies(base, domain)[choice].train(training)
    expected = net(double_images())
    found = domain.train(training).features(base, double_images())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_each_image_takes_the_copies_that_it_chose():
    base = double_base()
    domain = worn_domain(base)
    images = double_images(16)
    choices = domain.route.choices(images)
    assert 0 < choices.mean() < 1
    original, tuned = plain_copies(base, domain)
    original.eval(), tuned.eval()
    for image, chosen in zip(images, choices.tolist(), strict=True):
        x = F.relu(tuned.stem_bn(tuned.stem(image[None])))
        for block, choice in zip(find_blocks(base), chosen, strict=True):
            x = (tuned if choice else original).get_submodule(block.name)(x)
        found = domain.features(base, image[None])
        torch.testing.assert_close(found, x.mean((2, 3)), rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_fresh_domain_is_the_base_whatever_is_chosen():
    base = block_base()
    domain = pm.new_domain(base, "spottune", None).eval()
    for choice in (0, 1):
        always(domain, choice)
        assert torch.equal(domain.features(base, batch()[0]), base.net(batch()[0]))


@torch.no_grad()
def test_choices_are_zeros_and_ones_drawn_anew_in_training_and_fixed_at_test():
    base = double_base()
    route = worn_domain(base).route
    images = double_images(32)
    for training in (True, False):
        route.train(training)
        found = [route.choices(images) for _ in range(2)]
        assert all(choices.shape == (32, 4) for choices in found)
        assert all(((choices == 0) | (choices == 1)).all() for choices in found)
        assert torch.equal(*found) is not training
    logits = route.policy(images)
    assert torch.equal(route.choices(images), logits.argmax(2).double())


@torch.no_grad()
def test_choices_at_test_are_random_only_if_asked_for():
    base = double_base()
    domain = worn_domain(base)
    assert torch.equal(*(domain(base, double_images()) for _ in range(2)))
    sampling = worn_domain(base, sample_at_test=True)
    assert not torch.equal(*(sampling(base, double_images(32)) for _ in range(2)))


@torch.no_grad()
def test_in_training_the_odds_are_those_of_the_softmax_of_the_logits():
    base = block_base()
    route = pm.new_domain(base, "spottune", None, policy_width=1).train().route
    route.policy.logits.weight.zero_()
    route.policy.logits.bias.copy_(torch.tensor([0.0, 3.0]).log1p().repeat(4))  # odds 1 to 4
    torch.manual_seed(0)
    share = route.choices(torch.randn(5000, 3, 8, 8)).mean()  # 20,000 draws
    assert abs(share - 0.8) < 0.01


def test_the_policys_gradient_is_that_of_the_softmax_at_the_temperature():
    base = double_base()
    route = worn_domain(base, temperature=3.0).route.train()
    images, G = double_images(), torch.randn(6, 4, dtype=torch.float64)
    parameters = list(route.policy.parameters())
    torch.manual_seed(5)
    found = torch.autograd.grad((route.choices(images) * G).sum(), parameters)
    torch.manual_seed(5)
    logits = route.policy(images)
    gumbel = -torch.log(-torch.log(torch.rand_like(logits)))
    a = torch.exp((logits + gumbel) / 3.0)
    expected = torch.autograd.grad((a[..., 1] / a.sum(2) * G).sum(), parameters)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-14)
    assert all(gradient.abs().sum() > 0 for gradient in found[:2])


def test_training_moves_both_copies_norms_and_the_stem_but_not_the_base():
    base = block_base()
    torch.manual_seed(0)
    domain = pm.new_domain(base, "spottune", ["a", "b", "c"], policy_width=2)
    before = {name: t.clone() for name, t in domain.state_dict().items()}
    train(base, domain)
    still = [n for n, t in domain.state_dict().items() if torch.equal(t, before[n])]
    assert still == []
    assert any(name.startswith("route.norms") for name in before)
    base.verify()


@pytest.mark.parametrize("norms", ["own", "shared", "affine", "stats"])
def test_it_trains_under_every_policy_for_norms(norms):
    base = block_base()
    torch.manual_seed(0)
    domain = pm.new_domain(base, "spottune", ["a", "b", "c"], policy_width=2, norms=norms)
    losses = train(base, domain, steps=15, rate=1e-2)
    assert losses[-1] < losses[0]
    base.verify()


@torch.no_grad()
def test_statistics_of_both_copies_are_averaged_anew():
    base = double_base()
    domain = worn_domain(base)
    images = double_images(8)
    domain.reestimate_norms(base, [images])
    stem = F.conv2d(images, domain.weights(base)["stem.weight"], padding=1)
    own = dict(domain.named_norms())["stem_bn"]
    torch.testing.assert_close(own.running_mean, stem.mean((0, 2, 3)))
    entering = F.relu(F.batch_norm(stem, None, None, own.weight, own.bias, training=True))
    first = dict(zip(domain.route.norm_names, domain.route.norms, strict=True))["stages.0.0.bn1"]
    output = F.conv2d(entering, base.tensor("stages.0.0.conv1.weight"), padding=1)
    torch.testing.assert_close(first.running_mean, output.mean((0, 2, 3)))


def test_a_network_of_single_layers_without_norms_has_blocks_too():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, 2), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3), nn.ReLU(True)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    base = pm.load_base(net, input=SPEC)
    domain = pm.new_domain(base, "spottune", ["a", "b", "c"], policy_width=2)
    losses = train(base, domain, steps=30, rate=1e-2)
    assert min(losses[-5:]) < losses[0] - 0.1


def test_tokens_are_chosen_between_like_maps():
    base = pm.load_base("timm:vit_tiny_patch16_224", pretrained=False)
    domain = pm.new_domain(base, "spottune", ["a", "b"], policy_width=1)
    F.cross_entropy(domain(base, torch.randn(2, 3, 224, 224)), torch.tensor([0, 1])).backward()
    assert all(p.grad is not None for p in domain.parameters())
    assert len(domain.route.blocks) == 13


@torch.no_grad()
def test_the_policy_sees_large_images_averaged_down_and_takes_any_size():
    policy = Policy(3, 2, 4).eval()
    images = torch.randn(2, 3, 224, 224)
    assert torch.equal(policy(images), policy(F.avg_pool2d(images, 4)))
    assert policy(torch.randn(1, 3, 7, 13)).shape == (1, 4, 2)


def test_it_learns_and_predicts_the_same_twice():
    base = block_base()
    torch.manual_seed(0)
    domain = pm.new_domain(base, "spottune", ["a", "b", "c"], policy_width=4)
    recipe = Recipe(epochs=8, rate=3e-3, weight_rate=3e-3, head_rate=3e-2, drops=())
    history = fit(base, domain, Fixed(), Fixed(1, offset=99), recipe)
    assert history[-1].loss < history[0].loss / 2
    assert max(record.val_accuracy for record in history) > 90


def test_the_policy_learns_at_the_rate_of_weights_and_all_norms_at_that_of_norms_or_scalars():
    domain = pm.new_domain(block_base(), "spottune", ["a"], policy_width=2)
    groups = domain.param_groups()
    policy = {id(p) for p in domain.route.policy.parameters()}
    deltas = {id(p) for p in domain.transforms.parameters()}
    assert {id(p) for p in groups["weights"]} == policy | deltas
    assert {id(p) for p in groups["transforms"]} == {id(p) for p in domain.route.norms.parameters()}


def test_ten_domains_cost_what_the_published_network_does():
    base = pm.load_base("decathlon-resnet26", pretrained=False, device="meta")
    whole = account(base, "spottune", domains=10)
    policy = Policy(3, 32, 12)
    size = sum(p.numel() for p in policy.parameters())
    convolutions = sum(m.weight.numel() for m in policy.modules() if isinstance(m, nn.Conv2d))
    assert convolutions == 1_162_080
    assert whole.params_paper == pytest.approx(11.80, abs=0.05)
    without = whole.params_paper - 9 * size / whole.base_parameters
    assert without == pytest.approx(10.0, abs=0.015)
    assert whole.components["norm_affine"] == 32 * 2 * (3872 + 3584)  # the second set in blocks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature=0 must be a number"),
        ({"sample_at_test": 1}, "sample_at_test=1 must be true or false"),
        ({"policy_width": 0}, "policy_width=0 must be a whole number"),
        ({"policy_width": 2.0}, "policy_width=2.0 must be a whole number"),
    ],
)
def test_a_senseless_option_is_refused_by_name(options, message):
    with pytest.raises(pm.MethodError, match=message):
        SpotTune(**options)


def test_a_base_without_blocks_or_images_is_refused():
    with pytest.raises(pm.BaseError, match="has no chain of blocks"):
        pm.new_domain(tiny_base(), "spottune", ["a"])
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    base = pm.load_base(net, input=pm.InputSpec((5,), (0.5,) * 5, (0.5,) * 5))
    with pytest.raises(pm.BaseError, match="looks at images"):
        pm.new_domain(base, "spottune", ["a"])
