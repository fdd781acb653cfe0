"""A domain's own norm layers: tensors that stand in for the base's."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polymask.survey import Norm

if TYPE_CHECKING:
    from polymask.base import Base
    from polymask.methods.method import NormPolicy

COUNTER = "num_batches_tracked"  # matters while statistics are gathered, never afterwards


class OwnNorm(nn.Module):
    """One norm layer's own scale and shift (parameters) and statistics (buffers)."""

    def __init__(self, base: "Base", norm: Norm, policy: "NormPolicy") -> None:
        super().__init__()
        if policy in ("own", "affine"):
            for name in norm.affine:
                self.register_parameter(name, nn.Parameter(_start(base, norm, name)))
        if policy in ("own", "stats"):
            for name in norm.statistics:
                self.register_buffer(name, _start(base, norm, name))

    def tensors(self) -> dict[str, Tensor]:
        """All of them by their names inside the norm layer."""
        return dict(self.named_parameters()) | dict(self.named_buffers())

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


def _start(base: "Base", norm: Norm, name: str) -> Tensor:
    """A copy of the base's tensor; on the meta device where a skeleton is being built."""
    tensor = base.tensor(f"{norm.name}.{name}".lstrip("."))
    if torch.empty(0).is_meta:
        return tensor.to("meta")
    return tensor.detach().clone()
