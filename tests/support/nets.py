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


class BasicBlock(nn.Module):
    """conv-BN-ReLU-conv-BN, plus the shortcut, then ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if (inputs, stride) != (outputs, 1):
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class BlockNet(nn.Module):
    """A residual network of four blocks in three stages: 16, 8 and 4 pixels wide."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(4)
        self.stages = nn.Sequential(
            nn.Sequential(BasicBlock(4, 4)),
            nn.Sequential(BasicBlock(4, 8, stride=2), BasicBlock(8, 8)),
            nn.Sequential(BasicBlock(8, 12, stride=2)),
        )
        self.fc = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem_bn(self.stem(x)))
        return self.fc(self.stages(x).mean((2, 3)))


def tiny_net(seed: int = 0) -> TinyNet:
    torch.manual_seed(seed)
    net = TinyNet()
    _wear_norms(net)
    return net


def tiny_base(seed: int = 0, **options) -> pm.Base:
    return pm.load_base(tiny_net(seed), name="tiny", input=SPEC, **options)


def block_net(seed: int = 0) -> BlockNet:
    torch.manual_seed(seed)
    net = BlockNet()
    _wear_norms(net)
    return net


def block_base(seed: int = 0, **options) -> pm.Base:
    return pm.load_base(block_net(seed), name="blocks", input=SPEC, **options)


def _wear_norms(net: nn.Module) -> None:
    """Give the batch norms tensors that are not those of fresh layers."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.normal_(module.weight, 1, 0.1)


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
