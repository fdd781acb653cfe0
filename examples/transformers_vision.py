""".venv/bin/python examples/transformers_vision.py: domains on Hugging Face transformers vision models.

Pass a model to `pm.load_base` unmodified. From the object that it returns, polymask takes the logits if
there are any, else the pooled features. The models here are small and have random weights;
`AutoModel.from_pretrained` loads trained ones, and the rest stays the same. pip install 'polymask[examples]'.
"""

import tempfile

import torch
import torch.nn.functional as F

import polymask as pm

pm.import_torchvision()  # transformers imports it, which with a CPU-only torch needs help
from transformers import (  # noqa: E402
    ConvNextConfig,
    ConvNextModel,
    Dinov2Config,
    Dinov2Model,
    ViTConfig,
    ViTForImageClassification,
)

SIDE, STEPS = 32, 40
SIZE = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
PATCHES = {"image_size": SIDE, "patch_size": 4}


def make_models() -> dict[str, torch.nn.Module]:
    """A classifier with a head, and two backbones without one."""
    vit = ViTConfig(**SIZE, **PATCHES, intermediate_size=192)
    dino = Dinov2Config(**SIZE, **PATCHES, mlp_ratio=2)
    convnext = ConvNextConfig(hidden_sizes=[24, 48, 96, 192], depths=[1, 1, 2, 1])
    return {
        "vit": ViTForImageClassification(vit),
        "dinov2": Dinov2Model(dino),
        "convnext": ConvNextModel(convnext),
    }


def main() -> None:
    """The same few lines for all three."""
    torch.manual_seed(0)
    data = pm.load_data("letters", limit=640, classes=5)
    spec = pm.InputSpec(shape=(3, SIDE, SIDE), mean=(0.5,) * 3, std=(0.5,) * 3)
    recipe = pm.get_recipe("quick", side=SIDE, batch_size=32)
    loaders = pm.make_loaders(data, spec, recipe)
    batches = [batch for epoch in range(STEPS) for batch in loaders.train.batches(epoch)][:STEPS]
    test, _ = next(loaders.test.batches())
    for name, net in make_models().items():
        base = pm.load_base(net, name=name, input=spec)
        domain = pm.new_domain(base, "affine-full", data.classes)
        model = pm.DomainModel(base, domain).train()
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
        losses = []
        for images, labels in batches:
            loss = F.cross_entropy(model(images), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
        print(
            f"{name}: {len(base.sites)} sites, {base.feature_dim} features "
            f"({'in place of ' + base.classifier if base.classifier else 'pooled by the model'}), "
            f"loss {first:.3f} -> {last:.3f}"
        )
        assert last < first
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            domain.save(f"{folder}/{name}.safetensors")
            many = pm.MultiDomainModel(base, library=folder)
            assert torch.equal(many(test, domain=name), model.eval()(test))
        base.verify()
    print("every pack gives the same logits; every base is byte for byte what it was")


if __name__ == "__main__":
    main()
