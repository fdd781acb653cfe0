"""In which types a domain learns, whatever the type of its base.

A step of training is often smaller than what separates two neighbours in half precision, where it
would change nothing. So what learns is in float32 (float64 on a base of that type), and is cast
where a layer of the base wants its own type.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def learned_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which something learns that stands for a tensor of type `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def linear_head(features: int, classes: int, dtype: torch.dtype, *, device: str | None = None) -> nn.Linear:
    """A head on features of type `dtype`, to be learned."""
    wide = learned_type(dtype)
    kind = nn.Linear if wide == dtype else WideLinear
    return kind(features, classes, dtype=wide, device=device)


class WideLinear(nn.Linear):
    """A linear map in its own, wider type of features in half precision."""

    def forward(self, features: Tensor) -> Tensor:
        """Logits (N, classes) of features (N, D)."""
        return F.linear(features.to(self.weight.dtype), self.weight, self.bias)
