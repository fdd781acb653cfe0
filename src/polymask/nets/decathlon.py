"""The two networks that the decathlon literature calls Wide ResNet-28 with a widening of 4.

Both have three stages of four basic blocks with 64, 128 and 256 channels, halve the resolution at
the start of every stage, and end in a 256-way average pool. They differ in stem, shortcut and end:

=====================  ============  ==============================  ===========
name                   stem          shortcut of a strided block     end
=====================  ============  ==============================  ===========
`decathlon-resnet26`   32, no ReLU   2x2 average, zero channels      BN + ReLU
`decathlon-wrn28`      16, ReLU      1x1 convolution of stride 2+BN  nothing
=====================  ============  ==============================  ===========

The first is used by the residual- and parallel-adapter papers and SpotTune; the second by the
authors of the affine masks.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (64, 128, 256)
BLOCKS = 4


class _Block(nn.Module):
    """conv-BN-ReLU-conv-BN, plus the shortcut, then ReLU; (N, C, H, W) -> (N, C', H / s, W / s)."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1 = _conv3x3(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv3x3(outputs, outputs, 1)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = F.relu(y + self.shortcut(x))
        return out


class _ZeroChannels(nn.Module):
    """The shortcut without weights: halve the resolution, double the channels with zeros."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, 2)
        return torch.cat([x, torch.zeros_like(x)], dim=1)


class DecathlonNet(nn.Module):
    """Three stages of basic blocks between a stem and a linear classifier."""

    def __init__(
        self, stem: int, stem_relu: bool, end_norm: bool, shortcut: Callable[[int, int], nn.Module], classes: int = 1000
    ) -> None:
        super().__init__()
        self.conv1 = _conv3x3(3, stem, 1)
        self.bn1 = nn.BatchNorm2d(stem)
        self.stem_relu = nn.ReLU() if stem_relu else nn.Identity()
        stages, inputs = [], stem
        for width in WIDTHS:
            blocks = [_Block(inputs, width, 2, shortcut(inputs, width))]
            blocks += [_Block(width, width, 1, nn.Identity()) for _ in range(BLOCKS - 1)]
            stages.append(nn.Sequential(*blocks))
            inputs = width
        self.stages = nn.Sequential(*stages)
        end = [nn.BatchNorm2d(inputs), nn.ReLU()] if end_norm else []
        self.end = nn.Sequential(*end, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.out_channels * math.prod(module.kernel_size)
                nn.init.normal_(module.weight, 0.0, math.sqrt(2.0 / fan_out))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes) of images (N, 3, H, W)."""
        x = self.stem_relu(self.bn1(self.conv1(x)))
        logits: Tensor = self.fc(self.end(self.stages(x)))
        return logits


def resnet26(classes: int = 1000) -> DecathlonNet:
    """25 convolutions of 5,806,944 weights; needs each stage to double the channels, from 32."""
    return DecathlonNet(32, False, True, lambda inputs, outputs: _ZeroChannels(), classes)


def wrn28(classes: int = 1000) -> DecathlonNet:
    """28 convolutions of 5,839,280 weights."""
    return DecathlonNet(16, True, False, _projection, classes)


NETS: dict[str, Callable[..., DecathlonNet]] = {"decathlon-resnet26": resnet26, "decathlon-wrn28": wrn28}


def _conv3x3(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def _projection(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, 2, bias=False), nn.BatchNorm2d(outputs))
