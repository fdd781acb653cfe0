"""Small networks and data that the tests share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polymask as pm

SPEC = pm.InputSpec(shape=(3, 16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)


class TinyNet(nn.Module):
    """Every kind of layer that a method must cope with, in 16 × 16 pixels."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.depthwise_bn = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4, bias=False)
        self.grouped_bn = nn.BatchNorm2d(16)
        self.plain = nn.Conv2d(16, 16, 1)
        self.dropout = nn.Dropout(0.1)
        self.hidden = nn.Linear(16, 12)
        self.fc = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_bn(self.stem(x)))
        x = F.relu(self.depthwise_bn(self.depthwise(x)))
        x = F.relu(self.grouped_bn(self.grouped(x)))
        x = F.relu(self.plain(x)).mean((2, 3))
        return self.fc(F.relu(self.hidden(self.dropout(x))))


def tiny_net(seed: int = 0) -> TinyNet:
    torch.manual_seed(seed)
    net = TinyNet()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics that are not those of a fresh layer
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.normal_(module.weight, 1, 0.1)
    return net


def tiny_base(seed: int = 0, **options) -> pm.Base:
    return pm.load_base(tiny_net(seed), name="tiny", input=SPEC, **options)


def batch(count: int = 8, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    patterns = 4 * torch.randn(classes, SPEC.shape[0], 1, 1, generator=generator)
    return patterns[labels] + 0.5 * torch.randn(count, *SPEC.shape, generator=generator), labels


def train(base: pm.Base, domain: pm.Domain, steps: int = 3, rate: float = 1e-3, seed: int = 0):
    """A few steps of an ordinary loop; the losses."""
    images, labels = batch(classes=len(domain.classes), seed=seed)
    model = pm.DomainModel(base, domain).train()
    optimiser = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), rate)
    losses = []
    torch.manual_seed(seed)
    for _ in range(steps):
        loss = F.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    model.eval()
    return losses


def trained(base: pm.Base, method: str = "affine-full", classes: int = 3, seed: int = 0, **options):
    torch.manual_seed(seed)
    domain = pm.new_domain(base, method, [f"class {i}" for i in range(classes)], **options)
    train(base, domain, seed=seed)
    return domain


@torch.no_grad()
def logits(base: pm.Base, domain: pm.Domain, seed: int = 0) -> Tensor:
    return domain(base, batch(seed=seed)[0])
