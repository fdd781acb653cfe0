"""A domain's own norm layers, and the types in which a domain learns.

In which types a domain learns, whatever the type of its base.

A step of training is often smaller than what separates two neighbours in half precision, where it
would change nothing. So what learns is in float32 (float64 on a base of that type), and is cast
where a layer of the base wants its own type.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from polymask.core.survey import Norm

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.method import NormPolicy


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


COUNTER = "num_batches_tracked"  # matters while statistics are gathered, never afterwards


class Fitting:
    """How tensors of a domain are given to one norm layer of a base, whatever its precision.

    Torch's batch norms take halves as long as all of their tensors are in float32, so those that
    stay the base's are widened beside the own ones. Any other layer computes in the type of its
    tensors, so own ones are cast to the base's.
    """

    def __init__(self, base: "Base", norm: Norm, policy: "NormPolicy") -> None:
        self.affine = norm.affine if policy in ("own", "affine") else ()
        self.statistics = norm.statistics if policy in ("own", "stats") else ()
        layer = base.net.get_submodule(norm.name)
        self.widens = bool(norm.statistics) and isinstance(layer, _NormBase)
        self.places = {n: f"{norm.name}.{n}".lstrip(".") for n in norm.affine + norm.statistics}
        owned = {*self.affine, *self.statistics}
        self.rest = tuple(n for n in self.places if n not in owned) if self.widens else ()

    def type(self, base: "Base", name: str) -> torch.dtype:
        """The type in which the layer takes a tensor."""
        dtype = base.tensor(self.places[name]).dtype
        return learned_type(dtype) if self.widens and dtype.is_floating_point else dtype

    def __call__(self, base: "Base", own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the layer runs with, by names in the network; `own` has those in the layer."""
        tensors = {self.places[n]: t.to(self.type(base, n)) for n, t in own.items()}
        for name in self.rest if own else ():
            theirs, dtype = base.tensor(self.places[name]), self.type(base, name)
            if theirs.dtype != dtype:
                tensors[self.places[name]] = theirs.to(dtype)
        return tensors


class OwnNorm(nn.Module):
    """One norm layer's own scale and shift (parameters) and statistics (buffers)."""

    def __init__(self, base: "Base", norm: Norm, policy: "NormPolicy") -> None:
        super().__init__()
        self.fitting = fitting = Fitting(base, norm, policy)
        for name in fitting.affine:
            tensor = base.tensor(fitting.places[name])
            start = _copy(tensor, learned_type(tensor.dtype))
            self.register_parameter(name, nn.Parameter(start))
        for name in fitting.statistics:
            tensor = base.tensor(fitting.places[name])
            # The layer writes to them, so they are kept in the type that it takes.
            self.register_buffer(name, _copy(tensor, fitting.type(base, name)))

    def tensors(self) -> dict[str, Tensor]:
        """All of them by their names inside the norm layer."""
        return dict(self.named_parameters()) | dict(self.named_buffers())

    def in_layer(self, base: "Base") -> dict[str, Tensor]:
        """What the layer runs with, by names in the network."""
        return self.fitting(base, self.tensors())

    def stored(self) -> dict[str, Tensor]:
        """Those that inference needs."""
        return {name: t.detach() for name, t in self.tensors().items() if name != COUNTER}

    def restore(self, stored: Mapping[str, Tensor]) -> None:
        """Take on stored tensors, which are kept, not copied."""
        for name, tensor in stored.items():
            if name in self._buffers:
                self._buffers[name] = tensor
            else:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        if COUNTER in self._buffers:
            self._buffers[COUNTER] = torch.zeros((), dtype=torch.int64)

    def reset_statistics(self) -> None:
        """Forget the statistics: mean 0, variance 1, no batch seen."""
        for name, buffer in self.named_buffers():
            buffer.fill_(1 if name == "running_var" else 0)


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of the base's tensor; on the meta device where a skeleton is being built."""
    if torch.empty(0).is_meta:
        return tensor.to("meta", dtype)
    return tensor.detach().to(dtype, copy=True)
