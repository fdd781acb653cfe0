"""Methods of today on a ViT, a ConvNeXt and a ResNet: all learn, are stored and merged to the bit."""

import pytest
import torch
import torch.nn.functional as F

import polymask as pm

NETS = {  # a layer that a method must reach: a fused qkv, a depthwise kernel, a convolution before a norm
    "timm:test_vit": "blocks.0.attn.qkv.weight",
    "timm:test_convnext": "stages.0.blocks.0.conv_dw.weight",
    "timm:test_resnet": "layer1.0.conv1.weight",
}
METHODS = {
    "bitdelta-row": {},
    "bitdelta-column": {},
    "lora": {},
    "dora": {},
    "vera": {},
    "ssf": {},
    "bitfit": {},
    "taps": {},
    "ftn": {},
    "tsa": {"sites": "all"},
    "supsup": {},
    "wsn": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", NETS)
def test_a_domain_on_a_real_architecture_learns_and_is_stored_and_merged_to_the_bit(network, method, tmp_path):
    torch.manual_seed(0)
    base = pm.load_base(network, pretrained=False)
    domain = pm.new_domain(base, method, ["a", "b", "c"], **METHODS[method])
    images, labels = torch.randn(4, *base.input.shape), torch.tensor([0, 1, 2, 0])

    model = pm.DomainModel(base, domain).train()
    optimiser = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), 3e-3)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()

    site = base.sites[NETS[network]]
    weights = domain.weights(base)
    if method != "bitfit":
        assert not torch.equal(weights[site.name], base.tensor(site.name))
    elif site.has_bias:
        assert not torch.equal(weights[site.bias], base.tensor(site.bias))
    else:  # some norms scale by zero in a fresh network, and what is before them does not learn yet
        shifts = [f"{norm}.bias" for norm in base.norms]
        assert f"{site.norm}.bias" in weights.keys() == set(shifts)
        assert any(not torch.equal(weights[name], base.tensor(name)) for name in shifts)

    domain.save(tmp_path / "domain.safetensors")
    loaded = pm.load_domain(tmp_path / "domain.safetensors", base)
    with torch.no_grad():
        expected = domain(base, images)
        assert torch.equal(loaded(base, images), expected)
        assert torch.equal(loaded.merged(base)(images), expected)
    base.verify()
