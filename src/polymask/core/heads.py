"""Heads: one linear map from features to logits, in the forms that it learns by, and in the one that is stored."""

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymask.core.survey import learned_type
from polymask.errors import DomainError

SIZE = 1000.0  # of features around their middle, summed, as a centred head sees them


def linear_head(features: int, classes: int, dtype: torch.dtype, *, device: str | None = None) -> nn.Linear:
    """A head on features of type `dtype`, to be learned."""
    wide = learned_type(dtype)
    kind = nn.Linear if wide == dtype else WideLinear
    return kind(features, classes, dtype=wide, device=device)


def head_tensors(head: nn.Linear) -> dict[str, Tensor]:
    """What is stored of a head: the weight and the bias of one linear map."""
    if not isinstance(head, LearningHead):
        return {name: parameter.detach() for name, parameter in head.named_parameters()}
    weight, bias = head.folded()
    return {"weight": weight.detach(), "bias": bias.detach()}


def stored_head(head: nn.Linear) -> nn.Linear:
    """The head that a stored domain has in this one's place, without memory where that is another."""
    if not isinstance(head, LearningHead):
        return head
    return linear_head(head.in_features, head.out_features, head.feature_dtype, device="meta")


class WideLinear(nn.Linear):
    """A linear map in its own, wider type of features in half precision."""

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features.to(self.weight.dtype), self.weight, self.bias)


class LearningHead(WideLinear, ABC):
    """A head that learns by other numbers than those it is stored by: the weight and the bias of one linear map."""

    def __init__(self, features: int, classes: int, dtype: torch.dtype) -> None:
        super().__init__(features, classes, dtype=learned_type(dtype))
        self.feature_dtype = dtype

    def weight_parameters(self) -> list[nn.Parameter]:
        """Those of its parameters that learn as whole weights do."""
        return []

    @abstractmethod
    def folded(self) -> tuple[Tensor, Tensor]:
        """The weight and the bias of what it computes."""


class CentredLinear(LearningHead):
    """A head on features around their middle, H (f - m) / u + c, from H = 0 and c = 0; stored as H / u and c - H m / u.

    Features behind a ReLU are positive. A step of Adam moves the row of a class by its rate in every feature the same
    way, so the logit of a class moves by the rate times the sum of all features, whatever the image shows. For some
    steps that is most of what the logits say, and it is wrong, so the features shrink: at a rate that would do well
    later, to nothing. m, the mean of the features before training, takes this part away from H and leaves it to c.

    What is left, the sum of |f - m| over all features, is another size for every network and size of images, and so
    would be what a step does at the same rate. In units of u it is `SIZE` in the mean over images, for all of them.
    """

    middle: Tensor  # m (features,)
    unit: Tensor  # u ()

    def __init__(self, middle: Tensor, unit: float, classes: int, dtype: torch.dtype) -> None:
        super().__init__(len(middle), classes, dtype)
        self.register_buffer("middle", middle.to(self.weight.dtype))
        self.register_buffer("unit", torch.tensor(unit, dtype=self.weight.dtype))
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    @classmethod
    def around(cls, features: Tensor, classes: int, dtype: torch.dtype) -> Self:
        """Around the mean of some images' features (N, features)."""
        wide = features.double()
        middle = wide.mean(0)
        return cls(middle, float((wide - middle).abs().sum(1).mean()) / SIZE or 1.0, classes, dtype)

    def mapped(self) -> Tensor:
        """What maps features around their middle, in their unit."""
        return self.weight

    def folded(self) -> tuple[Tensor, Tensor]:
        weight = self.mapped() / self.unit
        return weight, self.bias - (weight.double() @ self.middle.double()).to(self.bias.dtype)

    def forward(self, features: Tensor) -> Tensor:
        return F.linear((features.to(self.weight.dtype) - self.middle) / self.unit, self.mapped(), self.bias)


class MappedLinear(CentredLinear):
    """A head on features that a matrix maps first, H P (f - m) / u + c; P learns from I. Stored as one map."""

    def __init__(self, middle: Tensor, unit: float, classes: int, dtype: torch.dtype) -> None:
        super().__init__(middle, unit, classes, dtype)
        self.map = nn.Parameter(torch.eye(len(middle), dtype=learned_type(dtype)))

    @classmethod
    def at_random(cls, features: int, classes: int, dtype: torch.dtype) -> Self:
        """Around 0, with H and c as those of any new linear map."""
        head = cls(torch.zeros(features), 1.0, classes, dtype)
        head.reset_parameters()
        return head

    def weight_parameters(self) -> list[nn.Parameter]:
        return [self.map]

    def mapped(self) -> Tensor:
        """H P."""
        if self.weight.is_meta:  # only its shape is wanted, and there is no autocast
            return self.weight
        with torch.autocast(self.weight.device.type, enabled=False):
            return self.weight @ self.map


class BlockLinear(WideLinear):
    """A linear head whose classes came in blocks: each is computed by itself, so no block changes another's logits."""

    def __init__(self, head: nn.Linear, blocks: tuple[int, ...]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.blocks = head.in_features, head.out_features, blocks
        self.held = 0  # blocks, from the first on, whose logits say nothing to what learns
        self.weight, self.bias = head.weight, head.bias

    def forward(self, features: Tensor) -> Tensor:
        if len(self.blocks) == 1:
            return super().forward(features)
        features = features.to(self.weight.dtype)
        parts = zip(torch.split(self.weight, [*self.blocks]), torch.split(self.bias, [*self.blocks]), strict=True)
        logits = [F.linear(features, *part) for part in parts]
        return torch.cat([part.detach() for part in logits[: self.held]] + logits[self.held :], -1)


def in_blocks(head: nn.Linear | None, blocks: Any) -> BlockLinear:
    """A head whose classes came in these blocks; DomainError where a pack's note on them makes no sense."""
    whole = isinstance(blocks, list) and all(type(size) is int and size > 0 for size in blocks)
    if head is None or not whole or sum(blocks) != head.out_features:
        raise DomainError(f"the note on blocks of classes ({str(blocks)[:60]}) is not one for its head")
    return BlockLinear(stored_head(head), tuple(blocks))
