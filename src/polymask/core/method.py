"""What a method is: a frozen dataclass that gives every site its transform."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast, get_args, get_origin

import torch
from torch import Tensor, nn

from polymask.core.heads import linear_head
from polymask.core.parts import NormPolicy, Objective, Part, Route, Transform
from polymask.core.survey import Site
from polymask.errors import MethodError

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain

Images = Callable[[], Iterator[tuple[Tensor, Tensor]]]  # one pass over (images, labels)
Measure = Callable[["Domain"], float]  # gathers a domain's norms again; its result, higher is better
_LARGEST = 1e9  # of any number among the options: a pack of a stranger may say anything


class Stage(NamedTuple):
    """A stage of a method's training: its share of the epochs, and a factor of all rates."""

    share: float
    rate: float = 1.0


class OptionChecks:
    """For every method: values of options that make no sense are refused by name."""

    def check_types(self) -> None:
        """Raise unless a `Literal` has one of its values, a `bool` is true or false, and numbers are not absurd."""
        for option in fields(cast(Any, self)):
            value, allowed = getattr(self, option.name), get_args(option.type)
            if get_origin(option.type) is Literal and value not in allowed:
                raise MethodError(f"{option.name}={value!r} is not one of {', '.join(map(str, allowed))}")
            if option.type is bool and not isinstance(value, bool):
                raise MethodError(f"{option.name}={value!r} must be true or false")
            if isinstance(value, int | float) and not abs(value) <= _LARGEST:
                raise MethodError(f"{option.name}={value!r} must be a number from {-_LARGEST:g} to {_LARGEST:g}")

    def check_range(self, option: str, low: float, high: float) -> None:
        """Raise unless the option is a number in [low, high]."""
        value = getattr(self, option)
        if not isinstance(value, int | float) or not low <= value <= high:
            raise MethodError(f"{option}={value!r} must be a number from {low:g} to {high:g}")

    def check_whole(self, option: str, low: int = 1, high: int = 1 << 16) -> None:
        """Raise unless the option is a whole number in [low, high]."""
        value = getattr(self, option)
        if type(value) is not int or not low <= value <= high:
            raise MethodError(f"{option}={value!r} must be a whole number from {low} to {high}")

    def check_interval(self, option: str) -> None:
        """Raise unless the option is two numbers, low and high; keep it as a tuple of floats."""
        value = getattr(self, option)
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if not is_pair or not all(isinstance(end, int | float) for end in value) or not value[0] <= value[1]:
            raise MethodError(f"{option}={value!r} must be a range (low, high)")
        object.__setattr__(self, option, tuple(map(float, value)))


class InStages:
    """For methods that learn in stages; `fit` runs them, within one budget of epochs."""

    head_share: ClassVar[float] = 0.0  # of the epochs, at first, in which only the head learns

    @property
    def stages(self) -> tuple[Stage, ...]:
        """How training is divided: the shares are of one budget of epochs, and add up to 1."""
        return (Stage(1.0),)

    def next_stage(self, base: "Base", domain: "Domain", images: Images) -> "Domain | None":
        """What learns next, made of a domain that has learned and is in its stored form; None ends training."""
        return None

    def first_stage(self) -> "Method":
        """The method as a new domain begins with it."""
        return cast("Method", self)

    def at_rate(self, rate: float) -> "Method":
        """The method for a training whose steps are of the size `rate`."""
        return cast("Method", self)


class AmongDomains:
    """For methods whose domains depend on each other; `fit_all` learns them, in an order or together."""

    moves_base: ClassVar[bool] = False  # what domains share is trained: earlier ones may forget
    moves_norms: ClassVar[bool] = False  # its norms are the shared network's, not one domain's
    ordered: ClassVar[bool] = False  # a domain depends on those learned before it
    base_stage: ClassVar[bool] = False  # learns on the base's own images first, if there are any
    needs_own: ClassVar[bool] = False  # without these images it would be another method
    cumulative: ClassVar[bool] = False  # a domain keeps all that the earlier ones have
    refines: ClassVar[Stage | None] = None  # the stage of what `settle` leaves to learn on, if any
    joint: ClassVar[bool] = False  # all domains are learned together, batch by batch
    settles: ClassVar[bool] = False  # `settle` changes domains, though none depends on another before
    needs_others: ClassVar[bool] = False  # one domain alone would be another method
    takes_sources: ClassVar[bool] = False  # masks of domains that are there already are a part of it

    name: str

    def check_own(self, given: bool) -> None:
        """Raise where the method needs the base's own images and they are not given."""
        if self.needs_own and not given:
            raise MethodError(
                f"{self.name or type(self).__name__} trains the base on its own images first, and there are none: give "
                "them (fit_all(..., own=), or the folder of the base's own domain in a benchmark's data), or take "
                "another method"
            )

    def check_alone(self) -> None:
        """Raise where one domain alone cannot be learned."""
        if self.needs_others:
            raise MethodError(
                f"{self.name or type(self).__name__} makes one update of what several domains changed, and this is "
                "one domain: learn several together (fit_all, polymask benchmark), or take another method"
            )

    @property
    def needs(self) -> tuple[tuple[str, str], ...]:
        """(name, digest of masks) of the packs that a pack by this method cannot do without."""
        return ()

    def drawing_on(self, sources: Mapping[str, "Domain"]) -> "Method":
        """The method for a domain that draws on the masks of these."""
        raise MethodError(
            f"{self.name} draws on no other domains; leave sources out, or take affine-cross or affine-mix"
        )

    def draw_on(self, domain: "Domain", sources: Sequence["Domain"]) -> None:
        """Give a new domain the masks of its sources, in their order."""
        return

    def bake(self, domain: "Domain") -> None:
        """Let a domain hold all that it draws on, so that its pack stands alone."""
        raise MethodError(f"a domain by {self.name} stands alone already")

    @property
    def alone(self) -> bool:
        """Whether a domain depends on no other, so that each can be learned apart."""
        return not (self.ordered or self.joint or self.settles)

    def for_domains(self, domains: int) -> "Method":
        """The method for the last of so many domains, the base's own included."""
        return cast("Method", self)

    def for_base(self) -> "Method":
        """The method for the base's own domain, where it is learned first."""
        return cast("Method", self)

    def after(self, earlier: Sequence["Domain"]) -> "Method":
        """The method for a domain that is learned after these."""
        return cast("Method", self)

    def follow(self, domain: "Domain", earlier: Sequence["Domain"]) -> None:
        """Prepare a new domain that is learned after these, which are in their stored form."""
        return

    def tie(self, domains: Sequence["Domain"]) -> None:
        """Make what domains share the same tensors, before they are learned together."""
        return

    def settle(self, base: "Base", domains: Sequence["Domain"]) -> "Sequence[Domain]":
        """All domains as they are once the last has learned; those that can learn go on."""
        return domains

    def finish(self, base: "Base", learned: "Domain", settled: "Domain", measure: Measure) -> "Domain":
        """What becomes of a domain that has settled, by its own images."""
        return settled

    def moved(self, base: "Base", domains: Sequence["Domain"]) -> dict[str, Tensor]:
        """The base's own tensors as the method has changed them, by name."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Method(OptionChecks, InStages, AmongDomains, ABC):
    """How a domain is built on a base; its options are its fields.

    `norms` says whose the norm layers are: "own": the domain's own scale, shift and statistics, in training mode while
    it learns; "shared": the base's, frozen, in eval mode; "affine": own scale and shift on the base's statistics;
    "stats": own statistics under the base's scale and shift; "bias": own shift alone; "shift": that and own statistics.
    `norm_momentum` is that of own statistics (None: as the network has it), and `norm_reestimate` averages them over
    the training images once more after training.
    """

    name: str = ""
    norms: NormPolicy = "own"
    norm_momentum: float | None = None
    norm_reestimate: bool = False

    title: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    differences: ClassVar[str] = ""  # from the original: a page of the documentation shows it
    mergeable: ClassVar[bool] = True
    for_classes: ClassVar[bool] = False  # what it adds to the loss takes heads for those of classes
    leaves_sites: ClassVar[bool] = False  # norms and head are all that a domain learns
    wider: ClassVar[Mapping[str, Any]] = {}  # options that reach more of a base's sites
    unnamed: ClassVar[Mapping[str, Any]] = {}  # newer options, as packs that lack them mean them
    retired: ClassVar[tuple[str, ...]] = ()  # options of earlier versions, which packs may have

    def __post_init__(self) -> None:
        self.check_types()
        momentum = self.norm_momentum
        if momentum is None:
            return
        if not isinstance(momentum, int | float) or not 0 < momentum <= 1:
            raise MethodError(f"norm_momentum={momentum!r} must be in (0, 1], or None")
        object.__setattr__(self, "norm_momentum", float(momentum))

    @property
    def learns_on(self) -> bool:
        """Whether a domain that has learned can be the beginning of another training."""
        return self.alone and not self.moves_base and len(self.stages) == 1

    @abstractmethod
    def transform(self, site: Site) -> Transform | None:
        """What the domain learns at one site; None leaves the site as the base has it."""

    def together(self, base: "Base", domain: "Domain", out: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """W~ of sites in one operation, where that is faster; the others are made one by one.

        With `out`, W~ is written to memory that is there already, for inference.
        """
        return {}

    def carry(self, base: "Base") -> "Part | None":
        """Tensors that are stored with the domain for the next one; nothing runs through them."""
        return None

    def route(self, base: "Base") -> Route | None:
        """How images go through the base, for the few methods where activations decide."""
        return None

    def head(self, features: int, classes: int, dtype: torch.dtype) -> nn.Linear:
        """The head of a new domain, for features of type `dtype`."""
        return linear_head(features, classes, dtype)

    def objective(self, base: "Base", domain: "Domain", images: Images) -> Objective | None:
        """What is added to the loss while `domain` learns from `images`."""
        return None

    def options(self) -> dict[str, Any]:
        """The options, without the name: `create_method(name, **options)` gives them back."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
