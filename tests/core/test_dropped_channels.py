"""Layers without the channels that are switched off: the same outputs from fewer channels."""

import pytest
import torch
from torch import nn

from polymask.core.network import PrunedGroups, PrunedLayer, without_channels

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SIZES = [7, 6, 5]
SOME = torch.tensor([1, 0, 0, 1, 0, 0, 1, 1]).bool()


def switch_off(layer: nn.Module, switches: torch.Tensor) -> nn.Module:
    """Zero the weights of the channels that are off, one by one."""
    groups = getattr(layer, "groups", 1)
    for channel in (~switches).nonzero().view(-1).tolist():
        group, column = divmod(channel, len(switches) // groups)
        with torch.no_grad():
            if "Transpose" in type(layer).__name__:
                layer.weight[channel] = 0
            else:
                layer.weight.view(groups, -1, *layer.weight.shape[1:])[group, :, column] = 0
    return layer


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("make", [CONV, TRANSPOSED])
@pytest.mark.parametrize(("groups", "alive"), [(1, 4), (4, 3), (8, 4)])
def test_a_narrow_convolution_gives_what_the_wide_one_gives(dims, bias, make, groups, alive):
    torch.manual_seed(0)
    layer = make[dims](8, 16, 3, 2, 1, groups=groups, bias=bias).double()
    narrow = without_channels(switch_off(layer, SOME), SOME)
    share = alive / (8 if groups == 1 else groups)
    assert narrow.layer.weight.numel() == share * layer.weight.numel()
    x = torch.randn(2, 8, *SIZES[:dims], dtype=torch.float64)
    torch.testing.assert_close(narrow(x), layer(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(narrow(x[0]), layer(x[0]), rtol=0, atol=1e-12)


def test_only_whole_groups_are_left_out():
    layer = nn.Conv2d(8, 16, 3, groups=4)
    assert without_channels(layer, torch.tensor([1, 0, 0, 1, 1, 0, 0, 1]).bool()) is None
    narrow = without_channels(layer, torch.tensor([1, 0, 0, 0, 1, 1, 0, 0]).bool())
    assert isinstance(narrow, PrunedGroups)
    assert (narrow.layer.groups, narrow.layer.in_channels, narrow.layer.out_channels) == (2, 4, 8)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8)])
def test_a_narrow_linear_layer_takes_whatever_the_wide_one_takes(shape):
    torch.manual_seed(0)
    layer = nn.Linear(8, 5).double()
    x = torch.randn(shape, dtype=torch.float64)
    narrow = without_channels(layer, SOME)
    assert isinstance(narrow, PrunedLayer)
    assert narrow.layer.in_features == 4
    torch.testing.assert_close(narrow(x), switch_off(layer, SOME)(x), rtol=0, atol=1e-12)


def test_padding_modes_and_dilation_are_kept():
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 4, 3, padding=2, dilation=2, padding_mode="reflect").double()
    x = torch.randn(2, 8, 7, 7, dtype=torch.float64)
    narrow = without_channels(switch_off(layer, SOME), SOME)
    torch.testing.assert_close(narrow(x), layer(x), rtol=0, atol=1e-12)


def test_a_layer_that_reads_all_and_a_class_of_ones_own_are_left_as_they_are():
    class Standardised(nn.Conv2d):
        pass

    assert without_channels(nn.Conv2d(8, 4, 3), torch.ones(8).bool()) is None
    assert without_channels(Standardised(8, 4, 3), SOME) is None
    assert without_channels(nn.MultiheadAttention(8, 2), SOME) is None
    assert without_channels(nn.MultiheadAttention(8, 2).out_proj, SOME) is None


def test_the_wide_layer_is_not_changed_and_its_bias_is_shared():
    layer = nn.Conv2d(8, 4, 3)
    before = layer.weight.clone()
    narrow = without_channels(layer, SOME)
    assert torch.equal(layer.weight, before)
    assert layer.in_channels == 8
    assert narrow.layer.bias is layer.bias
