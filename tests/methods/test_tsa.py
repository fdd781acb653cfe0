"""TSA: adapters from a little of the identity, and a matrix before the head."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymask as pm
from nets import SPEC, batch, logits, tiny_base, train, trained
from polymask.core.accounting import component_bits
from polymask.train.descent import begin_head


def test_adapters_start_at_a_little_of_the_identity_in_every_group():
    base = tiny_base()
    taps = {name: t.adapter.detach() for name, t in pm.new_domain(base, "tsa", None).named_transforms()}
    assert taps.keys() == {"stem.weight", "depthwise.weight", "grouped.weight"}
    assert torch.equal(taps["stem.weight"], 1e-4 * torch.eye(8, 3))
    assert torch.equal(taps["depthwise.weight"], torch.full((8, 1), 1e-4))
    assert torch.equal(taps["grouped.weight"], 1e-4 * torch.cat([torch.eye(4, 2)] * 4))


def test_an_adapter_runs_beside_its_convolution():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, 3, stride=2, padding=1, bias=False)
    base = pm.load_base(nn.Sequential(conv, nn.Flatten()), input=SPEC, classifier=None)
    domain = pm.new_domain(base, "tsa", None)
    (_, tap), *_ = domain.named_transforms()
    nn.init.normal_(tap.adapter)
    images = batch()[0]
    beside = F.conv2d(images, tap.adapter.view(5, 3, 1, 1), stride=2)
    torch.testing.assert_close(domain.eval().features(base, images), (conv(images) + beside).flatten(1))


def test_the_head_sees_mapped_features_and_the_map_starts_as_nothing():
    base = tiny_base()
    domain = pm.new_domain(base, "tsa", ["a", "b", "c"]).eval()
    head, features = domain.head, torch.randn(4, 12)
    assert torch.equal(head.map, torch.eye(12))
    nn.init.normal_(head.map)
    expected = (features @ head.map.T) @ head.weight.T + head.bias
    torch.testing.assert_close(domain.classify(features), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stored_head_is_one_linear_map_of_the_usual_size(tmp_path, dtype):
    base = pm.load_base(tiny_base().net.to(dtype), name="tiny", input=SPEC)
    domain = pm.new_domain(base, "tsa", ["a", "b", "c"])
    nn.init.normal_(domain.head.map)
    domain.eval().save(tmp_path / "a.safetensors")
    loaded = pm.load_domain(tmp_path / "a.safetensors", base)
    plain = pm.new_domain(base, "parallel-adapter", ["a", "b", "c"])
    assert type(loaded.head) is type(plain.head)
    assert component_bits(domain)["head"] == component_bits(plain)["head"]
    assert torch.equal(loaded.head.weight, (domain.head.weight @ domain.head.map).detach())
    images = batch()[0].to(dtype)
    with torch.no_grad():
        assert torch.equal(loaded(base, images), domain(base, images))
        assert torch.equal(loaded.merged(base)(images), domain(base, images))


def test_the_head_begins_centred_with_its_map_as_others_do():
    base = tiny_base()
    domain, images = pm.new_domain(base, "tsa", ["a", "b", "c"]), batch(16)
    begin_head(base, domain, [images])
    assert not domain.eval()(base, images[0]).any()
    nn.init.normal_(domain.head.map)
    nn.init.normal_(domain.head.weight)
    features = domain.features(base, images[0])
    around = (features - domain.head.middle) / domain.head.unit
    expected = around @ domain.head.map.T @ domain.head.weight.T + domain.head.bias
    torch.testing.assert_close(domain.classify(features), expected, atol=1e-2, rtol=1e-4)  # of some thousands
    torch.testing.assert_close(logits(base, domain.frozen()), logits(base, domain), atol=1e-2, rtol=1e-4)


def test_the_map_learns_as_whole_weights_do():
    base = tiny_base()
    domain = trained(base, "tsa")
    assert not torch.equal(domain.head.map, torch.eye(12))
    groups = domain.param_groups()
    assert any(p is domain.head.map for p in groups["weights"])
    assert {id(p) for p in groups["head"]} == {id(domain.head.weight), id(domain.head.bias)}
    without = pm.new_domain(base, "tsa", ["a", "b", "c"], map_features=False)
    train(base, without)
    assert type(without.head) is nn.Linear
    assert torch.equal(logits(base, without.frozen()), logits(base, without))


def test_a_domain_takes_what_parallel_adapters_take():
    base = pm.load_base("torchvision:resnet50", pretrained=False, device="meta")
    ours, theirs = (pm.account(base, method, classes=7).components for method in ("tsa", "parallel-adapter"))
    assert ours == theirs
