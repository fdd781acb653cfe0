""".venv/bin/torchrun --nproc-per-node=2 examples/accelerate_loop.py: a domain in Hugging Face Accelerate's loop.

pip install 'polymask[vision,demo]' accelerate. `pm.DomainModel` is an ordinary module whose parameters are
the domain's, so Accelerate needs no further setup.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import polymask as pm


def main() -> None:
    """Train on the digits that come with scikit-learn; rank 0 saves the pack."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--out", default="digits.safetensors")
    given = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    # `accelerate launch` has been seen to start one process where two were requested.
    assert accelerator.num_processes == int(os.environ.get("WORLD_SIZE", "1"))

    base = pm.load_base("efficientnet-lite0")
    recipe = pm.get_recipe("quick", side=32, batch_size=given.images)
    data = pm.load_data("digits", limit=given.images)
    images, labels = next(pm.make_loaders(data, base.input, recipe).train.batches())

    torch.manual_seed(0)
    domain = pm.new_domain(base, "affine-full", data.classes, norms="affine")
    groups = domain.param_groups()
    body = groups["transforms"] + groups["norms"]
    model = pm.DomainModel(base, domain).train()
    optimiser = torch.optim.Adam([{"params": body, "lr": 5e-4}, {"params": groups["head"]}], 1e-2)
    batches = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
    model, optimiser, batches = accelerator.prepare(model, optimiser, batches)

    step, losses = 0, []
    while step < given.steps:
        for batch, answers in batches:
            loss = F.cross_entropy(model(batch), answers)
            optimiser.zero_grad()
            accelerator.backward(loss)
            optimiser.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            step += 1
            if step == given.steps:
                break

    accelerator.print(
        f"{accelerator.num_processes} processes, {step} steps: loss {losses[0]:.3f} -> {sum(losses[-5:]) / 5:.3f}"
    )
    if accelerator.is_main_process:
        domain.save(given.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
