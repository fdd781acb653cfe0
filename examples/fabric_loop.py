""".venv/bin/torchrun --nproc-per-node=2 examples/fabric_loop.py: a domain in a Lightning Fabric loop.

pip install 'polymask[vision,demo]' lightning-fabric. `pm.DomainModel` is an ordinary module whose parameters are
the domain's, so Fabric needs no further setup.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

import polymask as pm


def main() -> None:
    """Train on the digits that come with scikit-learn; rank 0 saves the pack."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--out", default="digits.safetensors")
    given = parser.parse_args()

    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fabric = Fabric(devices=local, num_nodes=world // local)
    fabric.launch()
    assert fabric.world_size == world

    base = pm.load_base("efficientnet-lite0")
    recipe = pm.get_recipe("quick", side=32, batch_size=given.images)
    data = pm.load_data("digits", limit=given.images)
    images, labels = next(pm.make_loaders(data, base.input, recipe).train.batches())

    fabric.seed_everything(0, verbose=False)
    domain = pm.new_domain(base, "affine-full", data.classes, norms="affine")
    groups = domain.param_groups()
    body = groups["transforms"] + groups["norms"]
    optimiser = torch.optim.Adam([{"params": body, "lr": 5e-4}, {"params": groups["head"]}], 1e-2)
    model, optimiser = fabric.setup(pm.DomainModel(base, domain).train(), optimiser)
    plain = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
    batches = fabric.setup_dataloaders(plain)

    step, losses = 0, []
    while step < given.steps:
        for batch, answers in batches:
            loss = F.cross_entropy(model(batch), answers)
            optimiser.zero_grad()
            fabric.backward(loss)
            optimiser.step()
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
            step += 1
            if step == given.steps:
                break

    fabric.print(f"{fabric.world_size} processes, {step} steps: loss {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}")
    if fabric.is_global_zero:
        domain.save(given.out)


if __name__ == "__main__":
    main()
