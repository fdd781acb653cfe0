""".venv/bin/python examples/plain_loop.py: a domain in your own training loop.

`pm.DomainModel` is an ordinary module whose parameters are exactly the domain's, and
`domain.param_groups()` returns them by part, so that the head can have its own optimiser, as in
the paper. The network is EfficientNet-Lite0 with its ImageNet weights; the images are scikit-learn's
digits.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import polymask as pm

EPOCHS = 4


def main() -> None:
    """Train, save, load, and show that the base is unchanged."""
    torch.manual_seed(0)
    base = pm.load_base("efficientnet-lite0")
    data = pm.load_data("digits", limit=400)
    recipe = pm.get_recipe("quick", side=48, batch_size=16)
    loaders = pm.make_loaders(data, base.input, recipe)

    # Few images and small batches: the base's norm statistics work better than new ones.
    domain = pm.new_domain(base, "affine-full", data.classes, norms="affine")
    domain.input = loaders.train.spec  # how its images are fed, which its pack keeps
    model = pm.DomainModel(base, domain)
    parts = domain.param_groups()
    optimisers = [
        torch.optim.Adam(parts["transforms"] + parts["norms"], lr=5e-4),
        torch.optim.SGD(parts["head"], lr=1e-2, momentum=0.9),
    ]
    losses = []
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in loaders.train.batches(epoch):
            loss = F.cross_entropy(model(images), labels)
            for optimiser in optimisers:
                optimiser.zero_grad()
            loss.backward()
            for optimiser in optimisers:
                optimiser.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {sum(losses[-10:]) / 10:.3f}")

    model.eval()
    images, labels = next(loaders.test.batches())
    with torch.no_grad():
        logits = model(images)
    accuracy = (logits.argmax(1) == labels).float().mean().item()
    print(f"{accuracy:.0%} of {len(labels)} test images are right")
    assert sum(losses[-10:]) < sum(losses[:10])

    with tempfile.TemporaryDirectory() as folder:
        pack = Path(folder) / "digits.safetensors"
        domain.save(pack)
        many = pm.MultiDomainModel(base, library=folder)
        again = many(images, domain="digits")
        size = pack.stat().st_size
    weights = sum(site.numel for site in base.sites.values())
    print(f"the pack has {size / 1e6:.2f} MB for {weights / 1e6:.2f} million masked weights")
    assert torch.equal(again, logits)
    base.verify()
    print(f"the base is byte for byte what it was: {base.fingerprint[:12]}…")


if __name__ == "__main__":
    main()
