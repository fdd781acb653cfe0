""".venv/bin/python examples/timm_backbones.py: domains on a ViT and a ConvNeXt from timm.

polymask is told nothing about either network: one forward pass shows which weights there are (attention,
depthwise convolutions) and which layer is the classifier. The weights are random here;
`pm.load_base("timm:NAME")` loads pretrained ones. Masks learn even on random weights.
"""

import torch
import torch.nn.functional as F

import polymask as pm

pm.import_torchvision()  # timm imports it, which with a CPU-only torch needs help
import timm  # noqa: E402

SIDE, STEPS = 32, 30
NETWORKS = {
    "vit_tiny_patch16_224": {"img_size": SIDE, "patch_size": 4},
    "convnext_atto": {},
}


def learn(base: pm.Base, domain: pm.Domain, loaders: pm.Loaders) -> list[float]:
    """Train everything that the domain owns for some steps of Adam; return the loss of each."""
    model = pm.DomainModel(base, domain).train()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for epoch in range(STEPS):
        for images, labels in loaders.train.batches(epoch):
            loss = F.cross_entropy(model(images), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
            if len(losses) == STEPS:
                model.eval()
                return losses
    raise AssertionError("an epoch has at least one batch")


def main() -> None:
    """The same loop for both networks."""
    data = pm.load_data("letters", limit=640, classes=5)
    spec = pm.InputSpec(shape=(3, SIDE, SIDE))
    loaders = pm.make_loaders(data, spec, pm.get_recipe("quick", side=SIDE, batch_size=16))
    images, _ = next(loaders.test.batches())
    for name, options in NETWORKS.items():
        torch.manual_seed(0)
        net = timm.create_model(name, pretrained=False, **options)
        base = pm.load_base(net, name=name, input=spec)
        kinds = sorted({site.kind for site in base.sites.values()})
        grouped = sum(site.groups > 1 for site in base.sites.values())
        print(
            f"{name}: {len(base.sites)} sites ({', '.join(kinds)}; {grouped} grouped), "
            f"{len(base.norms)} norms, classifier {base.classifier!r}"
        )
        domain = pm.new_domain(base, "affine-full", data.classes)
        losses = learn(base, domain, loaders)
        first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
        account = pm.account(base, "affine-full", classes=len(data.classes))
        bits = sum(account.components.values()) / account.base_parameters
        print(f"  loss {first:.3f} -> {last:.3f} in {STEPS} steps; {bits:.2f} bits a weight")
        assert last < first

        merged = domain.merged(base)  # an ordinary timm network
        with torch.no_grad():
            assert torch.allclose(merged(images), domain(base, images), atol=1e-5)
        base.verify()
        print("  merged, it gives the same logits; the base is byte for byte what it was")


if __name__ == "__main__":
    main()
