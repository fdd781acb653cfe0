"""What a method is: a frozen dataclass that gives every site its transform."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor, nn

from polymask.bits import Bits
from polymask.errors import MethodError
from polymask.survey import Site

Stored = Tensor | Bits
NormPolicy = Literal["own", "shared", "affine", "stats"]
NORM_POLICIES: tuple[str, ...] = get_args(NormPolicy)


class Transform(nn.Module, ABC):
    """One site's state: W -> W~.

    While training it holds what is learned; `restore` turns it into its stored form, which is
    what a pack keeps and what inference runs on. Both give the same W~ to the bit.
    """

    components: ClassVar[Mapping[str, str]]  # what each stored tensor counts as in accounting
    learns_weights: ClassVar[bool] = False  # whole weights, which want smaller steps than scores

    @abstractmethod
    def weight(self, base_weight: Tensor) -> Tensor:
        """W~ from W, of the same shape and type."""

    def bias(self, base_bias: Tensor | None) -> Tensor | None:
        """A bias for the site, from the base's (None where it has none); None changes nothing."""
        return None

    def mask(self) -> Tensor | None:
        """The mask as a boolean tensor, where there is one."""
        return None

    @abstractmethod
    def stored(self) -> dict[str, Stored]:
        """All that must be kept: `Bits` at one bit an element, tensors as they are."""

    @abstractmethod
    def restore(self, stored: Mapping[str, Stored]) -> None:
        """Take on the stored form; the tensors are kept, not copied."""


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """How a domain is built on a base; its options are its fields.

    `norms` says what becomes of the norm layers:
    "own": the domain's own scale, shift and statistics, in training mode while it learns;
    "shared": the base's, frozen, in eval mode; "affine": own scale and shift on the base's
    statistics; "stats": own statistics under the base's scale and shift.
    `norm_momentum` is that of own statistics (None: as the network has it), and
    `norm_reestimate` averages them over the training images once more after training.
    """

    name: str = ""
    norms: NormPolicy = "own"
    norm_momentum: float | None = None
    norm_reestimate: bool = False

    reference: ClassVar[str] = ""
    mergeable: ClassVar[bool] = True
    moves_base: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.check_choice("norms", NORM_POLICIES)
        momentum = self.norm_momentum
        is_number = isinstance(momentum, int | float)
        if momentum is not None and not (is_number and 0 < momentum <= 1):
            raise MethodError(f"norm_momentum={momentum!r} must be in (0, 1], or None")
        if momentum is not None:
            object.__setattr__(self, "norm_momentum", float(momentum))
        if not isinstance(self.norm_reestimate, bool):
            raise MethodError(f"norm_reestimate={self.norm_reestimate!r} must be true or false")

    def check_choice(self, option: str, allowed: tuple[str, ...]) -> None:
        """Raise unless the option's value is one of those allowed."""
        value = getattr(self, option)
        if value not in allowed:
            raise MethodError(f"{option}={value!r} is not one of {', '.join(allowed)}")

    @abstractmethod
    def transform(self, site: Site) -> Transform | None:
        """What the domain learns at one site; None leaves the site as the base has it."""

    def options(self) -> dict[str, Any]:
        """The options, without the name: `create_method(name, **options)` gives them back."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
