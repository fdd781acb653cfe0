"""Sites of every kind, in small networks and in real ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polymask as pm


def base_of(net: nn.Module, *shape: int) -> pm.Base:
    spec = pm.InputSpec(shape, (0.5,) * shape[0], (0.5,) * shape[0])
    return pm.load_base(net, input=spec)


def kinds(base: pm.Base) -> dict[str, str]:
    return {name: site.kind for name, site in base.sites.items()}


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_of_any_dimension_are_sites(dims):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    up = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    net = nn.Sequential(conv(2, 4, 3), norm(4), up(4, 4, 3, groups=2), conv(4, 4, 1, groups=4))
    base = base_of(net, 2, *[6] * dims)
    assert kinds(base) == {
        "0.weight": f"conv{dims}d",
        "2.weight": f"conv_transpose{dims}d",
        "3.weight": f"conv{dims}d",
    }
    assert [site.groups for site in base.sites.values()] == [1, 2, 4]
    learn_one_step(base, "affine-full-channel")


class Attention(nn.Module):
    def __init__(self, kdim: int | None = None) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, kdim=kdim, vdim=kdim)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        if self.attention.kdim != 8:
            return self.fc(self.attention(x, x[..., :6], x[..., :6])[0].mean(1))
        return self.fc(self.attention(x, x, x)[0].mean(1))


def test_attention_in_projections_are_sites():
    base = base_of(Attention(), 3, 16, 16)
    assert kinds(base) == {
        "patches.weight": "conv2d",
        "attention.in_proj_weight": "in_projection",
        "attention.out_proj.weight": "linear",
    }
    learn_one_step(base)


def test_separate_attention_projections_are_sites_too():
    base = base_of(Attention(kdim=6), 3, 16, 16)
    names = {f"attention.{p}_proj_weight" for p in "qkv"}
    assert names <= base.sites.keys()
    learn_one_step(base)


class Raw(nn.Module):
    """A weight that no module owns, used by a functional call, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.randn(6, 48) / 7)
        self.unused = nn.Linear(48, 3)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(F.linear(x.flatten(1), self.projection)))


def test_raw_parameters_of_functional_calls_are_sites_and_unused_layers_are_not():
    base = base_of(Raw(), 3, 4, 4)
    assert kinds(base) == {"projection": "linear"}
    learn_one_step(base)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.fc = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.second(F.relu(self.first(x.flatten(1))))))


def test_tied_weights_are_one_site_and_move_together():
    base = base_of(Tied(), 3, 2, 2)
    assert list(base.sites) == ["first.weight"]
    domain = pm.new_domain(base, "affine-full", ["a", "b"], k1=0.25).eval()
    images = torch.randn(3, 3, 2, 2)
    merged = domain.merged(base)
    assert merged.second.weight is merged.first.weight
    with torch.no_grad():
        assert torch.equal(merged(images), domain(base, images))
        assert not torch.equal(domain.features(base, images), base.net(images))


class Standardised(nn.Conv2d):
    """A convolution that standardises its kernels, as BiT has them: what it computes is not linear in its weight."""

    def forward(self, x: Tensor) -> Tensor:
        kernels = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, kernels / kernels.std((1, 2, 3), keepdim=True), self.bias)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(3, 3, 1)
        self.read = nn.Conv2d(3, 3, 1)  # by the network, and never called
        self.twice = nn.Conv2d(3, 3, 1)  # called, and read by the network too
        self.standardised = Standardised(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(self.plain(F.conv2d(x, self.read.weight, self.read.bias)))
        x = self.twice(self.standardised(F.conv2d(x, self.twice.weight)))
        return x.mean((2, 3))


def test_it_is_known_whether_a_layer_gives_what_its_weight_makes_of_an_input():
    base = base_of(Layers(), 3, 4, 4)
    assert {n: site.own_output for n, site in base.sites.items()} == {
        "read.weight": False,
        "plain.weight": True,
        "standardised.weight": False,
        "twice.weight": False,
    }


class TiedNorms(nn.Sequential):
    def __init__(self, leaf: str = "bias") -> None:
        norms = [nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)]
        super().__init__(*norms, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        setattr(self[3], leaf, getattr(self[1], leaf))


@pytest.mark.parametrize(
    ("leaf", "remedy"),
    [
        ("bias", r"3\.bias = nn\.Parameter\(3\.bias\.detach\(\)\.clone\(\)\), or take norms=\"shared\""),
        ("running_mean", r"3\.running_mean = 3\.running_mean\.detach\(\)\.clone\(\), or take"),
    ],
)
def test_norms_that_share_a_tensor_are_refused_by_name_where_a_domain_has_its_own(leaf, remedy):
    net = TiedNorms(leaf)
    with pytest.raises(pm.BaseError, match=rf"the norms 1 and 3 .*share their {leaf}, .*untie them first: {remedy}"):
        pm.new_domain(base_of(net, 3, 4, 4), "affine-full", ["a", "b"])
    apart = getattr(net[3], leaf).detach().clone()
    setattr(net[3], leaf, nn.Parameter(apart) if leaf == "bias" else apart)
    learn_one_step(base_of(net, 3, 4, 4))


def test_a_network_whose_norms_share_a_tensor_takes_methods_that_leave_them_as_they_are():
    base = base_of(TiedNorms(), 3, 4, 4)
    domain = pm.new_domain(base, "piggyback", ["a", "b"])
    images = torch.randn(2, 3, 4, 4)
    domain(base, images).sum().backward()
    torch.testing.assert_close(domain.eval().merged(base)(images), domain(base, images))


class Concatenated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 2, 1)
        self.b = nn.Conv2d(3, 2, 1)
        self.norm = nn.BatchNorm2d(4)
        self.c = nn.Conv2d(4, 4, 1)
        self.d = nn.Conv2d(4, 4, 1)
        self.end = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.cat([F.relu(self.a(x)), self.b(x)], 1))
        return self.end(self.c(x) + self.d(x)).mean((2, 3))


def test_a_norm_follows_through_concatenation_and_rectifying_but_not_through_a_sum():
    base = base_of(Concatenated(), 3, 4, 4)
    assert {n: s.norm for n, s in base.sites.items()} == {
        "a.weight": "norm",
        "b.weight": "norm",
        "c.weight": None,
        "d.weight": None,
    }


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.fc(x.flatten(1)), "hidden": x}


def test_a_model_output_with_logits_is_understood():
    base = base_of(nn.Sequential(Returns()), 3, 2, 2)
    assert base.classifier == "0.fc"
    assert base.feature_dim == 12


def learn_one_step(base: pm.Base, method: str = "affine-full") -> None:
    """Forward, backward and one step; every learned tensor gets a gradient, the base none."""
    torch.manual_seed(0)
    classes = ["a", "b"] if base.feature_dim else None
    domain = pm.new_domain(base, method, classes, scores=(-1e-4, 1e-4)).train()
    images = torch.randn(2, *base.input.shape)
    optimiser = torch.optim.Adam(domain.parameters(), 1e-5)
    for _ in range(2):  # the scores' gradient is zero while k2 and k3 are
        optimiser.zero_grad()
        domain(base, images).square().mean().backward()
        optimiser.step()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in domain.parameters())
    moved = [t for _, t in domain.named_transforms() if t.scores.grad.abs().max() > 0]
    assert len(moved) >= 0.9 * len(base.sites)
    base.verify()
    domain.eval()
    with torch.no_grad():
        assert torch.equal(domain.merged(base)(images), domain(base, images))


REAL = {
    "torchvision:resnet50": (53, 53, 2048, "fc"),
    "torchvision:densenet121": (120, 121, 1024, "classifier"),
    "torchvision:vgg16": (15, 0, 4096, "classifier.6"),
    "torchvision:vit_b_16": (49, 25, 768, "heads.head"),
    "timm:tf_efficientnet_lite0": (49, 49, 1280, "classifier"),
    "timm:vit_tiny_patch16_224": (49, 25, 192, "head"),
    "timm:convnext_atto": (40, 17, 320, "head.fc"),
    "decathlon-resnet26": (25, 26, 256, "fc"),
    "decathlon-wrn28": (28, 28, 256, "fc"),
}


@pytest.mark.parametrize("name", REAL)
def test_the_structure_of_a_real_network_is_found(name):
    base = pm.load_base(name, pretrained=False, device="meta")
    found = (len(base.sites), len(base.norms), base.feature_dim, base.classifier)
    assert found == REAL[name]
    in_sites = sum(site.numel for site in base.sites.values())
    assert in_sites > 0.9 * sum(p.numel() for p in base.net.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_real_network_runs_and_learns_one_step(name):
    torch.manual_seed(0)
    learn_one_step(pm.load_base(name, pretrained=False))
