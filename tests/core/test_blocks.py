"""Chains of blocks, in small networks and in real ones."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polymask as pm
from nets import SPEC, BasicBlock, batch, block_base, block_net, tiny_base
from polymask.core.blocks import Block, find_blocks, stage_ends


def names(base: pm.Base) -> list[str]:
    return [block.name for block in find_blocks(base)]


def names_in(net: nn.Module) -> list[str]:
    return names(pm.load_base(net, input=SPEC, classifier=None))


def per_stage(blocks: list[Block]) -> list[int]:
    return [sum(b.stage == stage for b in blocks) for stage in range(blocks[-1].stage + 1)]


REAL = {  # first and last block, blocks of each stage
    "torchvision:resnet18": (
        Block("layer1.0", 0, (64, 56, 56), (64, 56, 56)),
        Block("layer4.1", 3, (512, 7, 7), (512, 7, 7)),
        [2, 2, 2, 2],
    ),
    "torchvision:resnet50": (
        Block("layer1.0", 0, (64, 56, 56), (256, 56, 56)),
        Block("layer4.2", 3, (2048, 7, 7), (2048, 7, 7)),
        [3, 4, 6, 3],
    ),
    "torchvision:densenet121": (
        Block("features.denseblock1", 0, (64, 56, 56), (256, 56, 56)),
        Block("features.denseblock4", 3, (512, 7, 7), (1024, 7, 7)),
        [1, 2, 2, 2],
    ),
    "torchvision:vgg16": (
        Block("features.0", 0, (3, 224, 224), (64, 224, 224)),
        Block("classifier.3", 5, (4096,), (4096,)),
        [2, 2, 3, 3, 3, 2],
    ),
    "torchvision:mobilenet_v2": (
        Block("features.0", 0, (3, 224, 224), (32, 112, 112)),
        Block("features.18", 4, (320, 7, 7), (1280, 7, 7)),
        [2, 2, 3, 7, 5],
    ),
    "torchvision:efficientnet_b0": (
        Block("features.0", 0, (3, 224, 224), (32, 112, 112)),
        Block("features.8", 4, (320, 7, 7), (1280, 7, 7)),
        [2, 2, 2, 6, 6],
    ),
    "torchvision:vit_b_16": (
        Block("encoder.layers.encoder_layer_0", 0, (197, 768), (197, 768)),
        Block("encoder.layers.encoder_layer_11", 0, (197, 768), (197, 768)),
        [12],
    ),
    "efficientnet-lite0": (
        Block("blocks.0.0", 0, (32, 112, 112), (16, 112, 112)),
        Block("blocks.6.0", 4, (192, 7, 7), (320, 7, 7)),
        [1, 2, 2, 6, 5],
    ),
    "timm:resnet26d": (
        Block("layer1.0", 0, (64, 56, 56), (256, 56, 56)),
        Block("layer4.1", 3, (2048, 7, 7), (2048, 7, 7)),
        [2, 2, 2, 2],
    ),
    "timm:convnext_atto": (
        Block("stages.0.blocks.0", 0, (40, 56, 56), (40, 56, 56)),
        Block("stages.3.blocks.1", 3, (320, 7, 7), (320, 7, 7)),
        [2, 2, 6, 2],
    ),
    "timm:vit_tiny_patch16_224": (
        Block("patch_embed", 0, (3, 224, 224), (196, 192)),
        Block("blocks.11", 0, (197, 192), (197, 192)),
        [13],
    ),
    "decathlon-resnet26": (
        Block("stages.0.0", 0, (32, 64, 64), (64, 32, 32)),
        Block("stages.2.3", 2, (256, 8, 8), (256, 8, 8)),
        [4, 4, 4],
    ),
    "decathlon-wrn28": (
        Block("stages.0.0", 0, (16, 64, 64), (64, 32, 32)),
        Block("stages.2.3", 2, (256, 8, 8), (256, 8, 8)),
        [4, 4, 4],
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_the_blocks_of_a_real_network_are_found_without_its_weights(name):
    base = pm.load_base(name, pretrained=False, device="meta")
    blocks = find_blocks(base)
    assert (blocks[0], blocks[-1], per_stage(blocks)) == REAL[name]
    assert len({block.name for block in blocks}) == len(blocks)


def test_the_blocks_and_stages_of_a_small_residual_network_are_found():
    blocks = find_blocks(block_base())
    assert blocks == [
        Block("stages.0.0", 0, (4, 16, 16), (4, 16, 16)),
        Block("stages.1.0", 1, (4, 16, 16), (8, 8, 8)),
        Block("stages.1.1", 1, (8, 8, 8), (8, 8, 8)),
        Block("stages.2.0", 2, (8, 8, 8), (12, 4, 4)),
    ]
    assert stage_ends(blocks) == [blocks[0], blocks[2], blocks[3]]


@torch.no_grad()
def test_nothing_of_an_image_reaches_the_features_but_through_every_block():
    base = block_base()
    images, _ = batch()
    for block in find_blocks(base):
        module = base.net.get_submodule(block.name)
        handle = module.register_forward_hook(lambda module, args, output: output * 0 + 1)
        features = base.net(images)
        handle.remove()
        assert torch.equal(features, features[:1].expand_as(features))


def test_a_densenets_stages_start_at_its_transitions():
    base = pm.load_base("torchvision:densenet121", pretrained=False, device="meta")
    blocks = find_blocks(base)
    starts = [b.name for a, b in pairwise(blocks) if a.stage != b.stage]
    assert starts == [f"features.transition{i}" for i in (1, 2, 3)]
    assert [b.name for b in stage_ends(blocks)] == [f"features.denseblock{i}" for i in (1, 2, 3, 4)]


def test_looking_for_blocks_leaves_nothing_behind_in_the_base():
    base = block_base()
    images, _ = batch()
    before = base.net(images)
    find_blocks(base)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in base.net.modules())
    assert not any(m.training for m in base.net.modules())
    assert not any(p.requires_grad or p.grad is not None for p in base.net.parameters())
    assert torch.equal(base.net(images), before)
    base.verify()


def test_the_hooks_are_gone_even_if_the_network_fails():
    base = block_base()

    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("out of paper")

    base.net.stages[2][0].forward = fail
    with pytest.raises(RuntimeError, match="out of paper"):
        find_blocks(base)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in base.net.modules())


def test_blocks_are_found_where_no_gradients_are_kept_and_in_half_precision():
    base = pm.load_base(block_net().bfloat16(), input=SPEC)
    expected = find_blocks(block_base())
    with torch.no_grad():
        assert find_blocks(base) == expected
    with torch.inference_mode():
        assert find_blocks(base) == expected


def test_patterns_over_sites_do_not_change_the_blocks():
    assert find_blocks(block_base(exclude=["stages.1.*"])) == find_blocks(block_base())


def test_a_network_of_single_layers_is_refused_with_a_remedy():
    with pytest.raises(pm.BaseError, match=r"base tiny has no chain of blocks.* or use a method"):
        find_blocks(tiny_base())


def test_one_layer_alone_is_refused():
    with pytest.raises(pm.BaseError, match="no chain of blocks"):
        names_in(nn.Conv2d(3, 4, 3))


def test_the_layers_of_a_sequential_are_its_blocks_if_there_are_no_others():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(256, 6),
        nn.Linear(6, 5),
        nn.Linear(5, 2),
    )
    blocks = find_blocks(pm.load_base(net, input=SPEC))
    assert blocks == [
        Block("0", 0, (3, 16, 16), (4, 16, 16)),
        Block("3", 1, (4, 8, 8), (4, 8, 8)),
        Block("6", 2, (256,), (6,)),
        Block("7", 2, (6,), (5,)),
    ]


def test_layers_beside_blocks_are_no_blocks():
    stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    net = nn.Sequential(stem, nn.Conv2d(4, 4, 1), BasicBlock(4, 4), nn.Conv2d(4, 4, 1))
    assert names_in(net) == ["2"]


class Backwards(nn.Module):
    """Holds its blocks in a list, and runs them from the last to the first."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


def test_blocks_come_in_order_of_execution():
    assert names_in(Backwards(BasicBlock(4, 8), BasicBlock(3, 4))) == ["blocks.1", "blocks.0"]


def test_layers_in_a_module_list_are_blocks_too():
    assert names_in(Backwards(nn.Conv2d(4, 8, 1), nn.Conv2d(3, 4, 1))) == ["blocks.1", "blocks.0"]


def test_a_module_that_only_runs_its_blocks_is_looked_into():
    stages = [Backwards(BasicBlock(4, 4), BasicBlock(3, 4)), Backwards(BasicBlock(4, 4))]
    assert names_in(nn.Sequential(*stages)) == ["0.blocks.1", "0.blocks.0", "1"]


def test_a_whole_network_inside_another_is_looked_into():
    inside = [f"blocks.0.{name}" for name in names(block_base())]
    assert names_in(Backwards(block_net())) == inside


class MaybeResidual(nn.Module):
    """Two small networks in a row, with a way around them if the shape stays."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(Dressed(inputs, 8), Dressed(8, outputs))
        self.residual = inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.expand(x)
        return x + y if self.residual else y


class Dressed(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs), nn.ReLU())


def test_a_block_without_its_shortcut_is_a_block_like_the_others_of_its_class():
    net = nn.Sequential(Dressed(3, 4), MaybeResidual(4, 6), MaybeResidual(6, 6))
    assert names_in(net) == ["0", "1", "2"]


class Around(nn.Module):
    """Four blocks, one of which the data can pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (BasicBlock(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = x + self.b(x)
        x = self.c(x)
        kept, changed = x.split([1, 2], dim=1)
        return self.d(torch.cat([kept, changed.relu()], dim=1))


def test_a_block_that_data_can_pass_by_is_not_in_the_chain():
    assert names_in(Around()) == ["a", "c", "d"]


class Split(nn.Module):
    """A block on one half of the channels, and one on the only half that goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = BasicBlock(3, 4)
        self.second = BasicBlock(2, 2)
        self.third = BasicBlock(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, dim=1)
        _, x = torch.cat([self.second(right), left], dim=1).split([1, 3], dim=1)
        _, x = x.split([1, 2], dim=1)
        return self.third(x)


def test_a_block_on_some_of_the_channels_is_not_in_the_chain():
    assert names_in(Split()) == ["first", "third"]


class Gated(BasicBlock):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = super().forward(x)
        return x if gate is None else x * gate


class Odd(nn.Module):
    """A block that runs twice, one that takes two tensors, one that gives two, one without data."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.twice = Gated(3, 3), BasicBlock(3, 3)
        self.two_in, self.two_out = Gated(3, 3), Pair(3, 3)
        self.unused = BasicBlock(3, 3)
        self.empty = nn.Sequential(nn.Sequential(nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.empty(self.plain(x, gate=None))))
        x, _ = self.two_out(self.two_in(x, gate=x.sigmoid()))
        return F.relu(x)


class Pair(BasicBlock):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = super().forward(x)
        return x, x


def test_only_modules_called_once_with_one_tensor_in_and_out_are_blocks():
    assert names_in(Odd()) == ["plain"]
