"""Bases: how they are found, frozen, fingerprinted and fed."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import polymask as pm
from nets import SPEC, TinyNet, batch, tiny_base, tiny_net
from polymask.core.base import fingerprint
from polymask.nets.zoo import build

SITES = ["stem", "depthwise", "grouped", "plain", "hidden"]


def test_sites_come_in_order_of_execution_without_the_classifier():
    assert list(tiny_base().sites) == [f"{name}.weight" for name in SITES]


def test_the_norm_that_follows_each_site_is_known():
    sites = tiny_base().sites
    assert {name: site.norm for name, site in sites.items()} == {
        "stem.weight": "stem_bn",
        "depthwise.weight": "depthwise_bn",
        "grouped.weight": "grouped_bn",
        "plain.weight": None,
        "hidden.weight": None,
    }
    assert [site.batch_norm for site in sites.values()] == [True, True, True, False, False]


def test_the_classifier_is_taken_out_and_kept():
    base = tiny_base()
    assert base.classifier == "fc"
    assert base.feature_dim == 12
    assert isinstance(base.head, nn.Linear)
    assert base.net(batch()[0]).shape == (8, 12)


def test_the_users_own_module_is_not_touched():
    net = tiny_net().train()
    before = fingerprint(net)
    base = pm.load_base(net, input=SPEC)
    assert isinstance(net.fc, nn.Linear)
    assert net.training
    assert all(p.requires_grad for p in net.parameters())
    assert not any(p.requires_grad for p in base.net.parameters())
    assert base.tensor("stem.weight").data_ptr() == net.stem.weight.data_ptr()
    assert fingerprint(net) == before


def test_a_headless_network_keeps_all_its_layers_as_sites():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    base = pm.load_base(net, input=pm.InputSpec((3, 5, 5)))
    assert base.classifier is None
    assert base.feature_dim == 36
    assert list(base.sites) == ["0.weight"]


def test_a_linear_layer_that_something_follows_is_no_classifier():
    net = nn.Sequential(nn.Flatten(), nn.Linear(75, 8), nn.ReLU())
    assert pm.load_base(net, input=pm.InputSpec((3, 5, 5))).classifier is None
    net = nn.Sequential(nn.Flatten(), nn.Linear(75, 8), nn.BatchNorm1d(8))
    base = pm.load_base(net, input=pm.InputSpec((3, 5, 5)))
    assert base.classifier is None
    assert base.sites["1.weight"].norm == "2"


def test_the_classifier_can_be_named_or_denied():
    assert tiny_base(classifier=None).feature_dim == 10
    assert tiny_base(classifier="fc").feature_dim == 12
    with pytest.raises(pm.BaseError, match="does not run on an input"):
        tiny_base(classifier="hidden")
    with pytest.raises(pm.BaseError, match=r"no module 'fd' to take as its classifier; did you mean fc"):
        tiny_base(classifier="fd")
    with pytest.raises(pm.BaseError, match="stem_bn of base tiny is a BatchNorm2d"):
        tiny_base(classifier="stem_bn")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": ["*ed"]}, ["grouped"]),
        ({"include": ["stem", "hidden.weight"]}, ["stem", "hidden"]),
        ({"exclude": ["stem", "plain"]}, ["depthwise", "grouped", "hidden"]),
        ({"include": ["*d*"], "exclude": ["dep*"]}, ["grouped", "hidden"]),
    ],
)
def test_patterns_choose_sites(options, expected):
    assert [n.removesuffix(".weight") for n in tiny_base(**options).sites] == expected


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_an_error_with_a_near_match(option):
    with pytest.raises(pm.BaseError, match=r"no site matches 'groupd\*'; did you mean grouped.weight"):
        tiny_base(**{option: ["groupd*"]})


def test_equal_networks_have_equal_fingerprints_and_one_bit_makes_another():
    net = tiny_net()
    first = pm.load_base(net, input=SPEC).fingerprint
    assert pm.load_base(tiny_net(), input=SPEC).fingerprint == first
    with torch.no_grad():
        net.stem_bn.running_var[0] = torch.nextafter(net.stem_bn.running_var[0], torch.tensor(9.0))
    assert pm.load_base(net, input=SPEC).fingerprint != first


def test_the_fingerprint_depends_on_names_types_and_shapes():
    a = nn.Sequential(nn.Linear(4, 2, bias=False))
    b = nn.Sequential(nn.Linear(2, 4, bias=False))
    with torch.no_grad():
        b[0].weight.copy_(a[0].weight.reshape(4, 2))
    prints = {fingerprint(a), fingerprint(b), fingerprint(a[0]), fingerprint(a.double())}
    assert len(prints) == 4


def test_verify_notices_that_somebody_wrote_to_the_base():
    net = tiny_net()
    base = pm.load_base(net, input=SPEC)
    base.verify()
    with torch.no_grad():
        net.stem.weight[0, 0, 0, 0] += 1
    with pytest.raises(pm.BaseError, match="has changed since it was loaded"):
        base.verify()


def test_weights_that_are_not_finite_are_refused_by_name():
    net = tiny_net()
    with torch.no_grad():
        net.grouped.weight[0] = float("nan")
    with pytest.raises(pm.BaseError, match="of base tiny holds values that are not finite"):
        pm.load_base(net, name="tiny", input=SPEC)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 1, 16, 16), r"shape \(2, 1, 16, 16\); give a batch of float images"),
        (torch.zeros(3, 16, 16), r"shape \(3, 16, 16\)"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), r"images are torch.uint8; .*pixels in"),
        (torch.zeros(2, 3, 16, 16, device="meta"), "images are on meta, base tiny on cpu"),
    ],
)
def test_images_that_do_not_fit_are_refused_with_a_remedy(images, message):
    base = tiny_base()
    domain = pm.new_domain(base, "affine-full", ["a", "b"])
    with pytest.raises(pm.InputError, match=message):
        domain(base, images)


def test_a_size_that_the_network_cannot_take_is_an_input_error():
    net = nn.Sequential(nn.Flatten(), nn.Linear(75, 8), nn.ReLU(), nn.Linear(8, 2))
    base = pm.load_base(net, input=pm.InputSpec((3, 5, 5)))
    with pytest.raises(pm.InputError, match=r"does not take images of shape \(3, 6, 6\)"):
        pm.new_domain(base, "affine-full", ["a"])(base, torch.zeros(1, 3, 6, 6))


def test_a_network_that_does_not_run_on_the_declared_input_says_so():
    with pytest.raises(pm.BaseError, match=r"does not run on an input of shape \(1, 16, 16\)"):
        pm.load_base(tiny_net(), input=pm.InputSpec((1, 16, 16), (0.5,), (0.5,)))


def test_weights_go_with_a_name_and_not_with_a_module(tmp_path):
    with pytest.raises(pm.BaseError, match="load them into the module first"):
        pm.load_base(tiny_net(), input=SPEC, weights=tmp_path / "w.pth")


def test_moving_a_base_leaves_the_users_module_where_it_is():
    net = tiny_net()
    base = pm.load_base(net, input=SPEC, device="meta")
    assert base.device.type == "meta"
    assert net.stem.weight.device.type == "cpu"


def test_a_slash_in_a_modules_name_is_refused():
    net = nn.Sequential()
    net.add_module("a/b", nn.Conv2d(3, 2, 1))
    with pytest.raises(pm.BaseError, match="has a slash in its name"):
        pm.load_base(net, input=SPEC)


def test_norms_may_have_any_name():
    net = nn.Sequential()
    net.add_module("conv", nn.Conv2d(3, 2, 1))
    net.add_module("values", nn.BatchNorm2d(2))
    base = pm.load_base(net, input=SPEC)
    assert [name for name, _ in pm.new_domain(base, "affine-full").named_norms()] == ["values"]


def test_a_lazy_network_is_refused():
    with pytest.raises(pm.BaseError, match="has no shape yet"):
        pm.load_base(nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), input=SPEC)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet50", "'resnet50' is not known; use one of efficientnet-lite0"),
        ("torchvision:resnet55", "no model 'resnet55'; did you mean resnet50"),
        ("torchvision:regnet_y_128gf", "no weights IMAGENET1K_V1 for regnet_y_128gf .it has IMAGENET1K_SWAG"),
        ("timm:resnet5000", "no model 'resnet5000'; did you mean resnet"),
        ("decathlon-wrn28", "nobody publishes weights of decathlon-wrn28; give weights=FILE"),
    ],
)
def test_an_unknown_base_is_refused_with_a_remedy(name, message):
    with pytest.raises(pm.BaseError, match=message):
        pm.load_base(name)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_come_from_a_file(tmp_path, suffix):
    from polymask.nets.decathlon import wrn28

    torch.manual_seed(5)
    state = wrn28().state_dict()
    path = tmp_path / f"w{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    base = pm.load_base("decathlon-wrn28", weights=path)
    assert torch.equal(base.tensor("conv1.weight"), state["conv1.weight"])


def test_weights_may_have_a_classifier_of_any_length(tmp_path):
    net, _ = build("resnet18-64", pretrained=False, classes=7)
    assert net.conv1.stride == (1, 1)
    path = tmp_path / "seven.safetensors"
    save_file(net.state_dict(), path)
    base = pm.load_base("resnet18-64", weights=path)
    assert base.head.out_features == 7
    assert base.input.shape == (3, 64, 64)
    assert torch.equal(base.head.weight, net.fc.weight)


def test_weights_that_do_not_fit_are_named(tmp_path):
    from polymask.nets.decathlon import resnet26

    path = tmp_path / "w.safetensors"
    save_file(resnet26().state_dict(), path)
    with pytest.raises(pm.BaseError, match=r"does not fit decathlon-wrn28: it lacks stages\.0\.0"):
        pm.load_base("decathlon-wrn28", weights=path)


def test_a_file_that_would_run_code_is_refused(tmp_path):
    path = tmp_path / "w.pth"
    torch.save(TinyNet(), path)
    with pytest.raises(pm.BaseError, match=r"holds .* beside tensors"):
        pm.load_base("decathlon-wrn28", weights=path)
    (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    with pytest.raises(pm.BaseError, match="not an intact safetensors file"):
        pm.load_base("decathlon-wrn28", weights=tmp_path / "x.safetensors")
    with pytest.raises(pm.BaseError, match="no weights at"):
        pm.load_base("decathlon-wrn28", weights=tmp_path / "none.pth")


@pytest.mark.parametrize(
    "options",
    [
        {"shape": ()},
        {"shape": (3, 0, 4)},
        {"mean": (0.5,)},
        {"std": (0.5, 0.5, 0.0)},
        {"mean": (0.5, 0.5, float("nan"))},
        {"interpolation": "lanczos"},
        {"crop": 0.0},
    ],
)
def test_a_senseless_input_spec_is_refused(options):
    with pytest.raises(pm.BaseError):
        pm.InputSpec(**options)


def test_efficientnet_lite0_carries_real_imagenet_weights():
    base = pm.load_base("efficientnet-lite0")
    assert base.input.mean == (0.5, 0.5, 0.5)
    assert (len(base.sites), base.feature_dim, base.classifier) == (49, 1280, "classifier")
    assert all(site.batch_norm for site in base.sites.values())
    # Trained statistics, not those of a fresh network.
    assert base.tensor("bn1.running_var").std() > 0.1
    assert base.fingerprint == pm.load_base("efficientnet-lite0").fingerprint


@pytest.mark.parametrize(
    ("notes", "side", "crop"),
    [
        ({"size": {"height": 224, "width": 224}}, 224, 1.0),
        ({"size": 256, "crop_size": 224, "do_center_crop": True}, 224, 0.875),
        (
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True},
            224,
            0.875,
        ),
        ({"size": 256, "crop_size": 224, "do_center_crop": False}, 256, 1.0),
    ],
)
def test_a_network_of_transformers_is_fed_as_its_folder_says(tmp_path, notes, side, crop):
    from polymask.nets.zoo import _transformers_input

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(notes))
    spec = _transformers_input(tmp_path / "preprocessor_config.json", object())
    assert (spec.side, spec.crop) == (side, crop)


def test_what_a_base_computes_is_told_while_it_runs_with_other_tensors_and_in_another_mode():
    base, shape, found = tiny_base(), (3, 20, 20), []
    expected = tiny_base().response(shape)

    def ask(module, inputs, output):  # as another thread may
        if not found:
            found.append(base.response(shape))

    others = {name: torch.zeros_like(base.tensor(name)) for name in base.sites}
    with base.hooked({"stem": ask}), base.training(list(base.norms)):
        base.run(others, batch()[0])
    assert found == [expected]


def test_what_a_base_computes_is_of_its_tensors_as_they_are_now():
    base, wide = tiny_base(), tiny_base().apply(torch.Tensor.double)
    assert wide.response((3, 20, 20)) == pytest.approx(base.response((3, 20, 20)), rel=1e-4, abs=1e-5)
    name = next(iter(base.sites))
    base.relocate({name: base.tensor(name).clone()})
    assert base.response((3, 24, 24)) == tiny_base().response((3, 24, 24))
