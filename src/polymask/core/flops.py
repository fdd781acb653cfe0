"""Floating point operations of a network, and what a domain saves of them.

A multiplication and an addition are two operations. Those of convolutions, matrix products and
attention are counted, as torch's own counter does it; norms, activations and copies are not.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from polymask.core.base import Base
from polymask.core.domain import Domain


def flops(net: nn.Module, input_shape: Sequence[int]) -> int:
    """Operations of one image of `input_shape`, counted while `net` runs on a blank one.

    The network is run as it is, in the mode that it is in. On the meta device nothing is computed.
    """
    tensors = (t for t in chain(net.parameters(), net.buffers()) if t.is_floating_point())
    like = next(tensors, torch.empty(0))
    blank = torch.zeros(1, *input_shape, device=like.device, dtype=like.dtype)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(blank)
    return int(counter.get_total_flops())


def flops_ratio(base: Base, domain: Domain) -> float:
    """Operations of a domain's compact network, over those of its network of the base's shape.

    1 where a domain drops no channels. Both have the domain's head, and its size of images.
    """
    compact, whole = (flops(domain.merged(base, compact=smaller), domain.input.shape) for smaller in (True, False))
    return compact / whole
