"""The network that costs are measured on, and a domain of it."""

import torch

import polymask as pm

NETWORK, SIDE, CLASSES = "torchvision:resnet50", 224, 200
NAMES = [f"class {i}" for i in range(CLASSES)]


def worn_domain(base: pm.Base, seed: int = 0) -> pm.Domain:
    """A domain as training leaves it: half the mask set, no scalar zero."""
    torch.manual_seed(seed)
    domain = pm.new_domain(base, "affine-full", NAMES)
    with torch.no_grad():
        for name, parameter in domain.transforms.named_parameters():
            parameter.normal_(0, 1e-2 if "scores" in name else 0.1)
    return domain.eval()
