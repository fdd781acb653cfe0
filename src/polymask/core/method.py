"""What a method is: a frozen dataclass that gives every site its transform."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from polymask.core.bits import Bits
from polymask.core.network import put_tensors
from polymask.core.norms import COUNTER
from polymask.core.survey import Site
from polymask.errors import MethodError

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain

Stored = Tensor | Bits
Images = Callable[[], Iterator[tuple[Tensor, Tensor]]]  # one pass over (images, labels)
NormPolicy = Literal["own", "shared", "affine", "stats"]
NORM_POLICIES: tuple[str, ...] = get_args(NormPolicy)


class Stage(NamedTuple):
    """A stage of a method's training: its share of the epochs, and a factor of all rates."""

    share: float
    rate: float = 1.0


class Part(nn.Module):
    """Something that a domain owns: learned tensors, and the form in which they are stored.

    While training it holds what is learned; `restore` turns it into its stored form, which is
    what a pack keeps and what inference runs on. By default both are all parameters and buffers.
    """

    components: ClassVar[Mapping[str, str]] = {}  # what a stored tensor counts as in accounting
    learns_weights: ClassVar[bool] = False  # whole weights, which want smaller steps than scores

    def component(self, name: str) -> str:
        """What the stored tensor `name` counts as in accounting: weights, but for a norm's statistics, if not said."""
        other = "norm_statistics" if name.rpartition(".")[2].startswith("running_") else "weights"
        return self.components.get(name, other)

    def weight_parameters(self) -> list[nn.Parameter]:
        """Those of the parameters that are whole weights."""
        return list(self.parameters()) if self.learns_weights else []

    def score_parameters(self) -> list[nn.Parameter]:
        """Those of the parameters that are scores: a decay would pull them to no purpose."""
        return []

    def scalar_parameters(self) -> list[nn.Parameter]:
        """Those of the parameters that are scalars of a site; they may have their own rate."""
        return []

    def stored(self) -> dict[str, Stored]:
        """All that must be kept: `Bits` at one bit an element, tensors as they are."""
        named = [*self.named_parameters(), *self.named_buffers()]
        return {name: t.detach() for name, t in named if not name.endswith(COUNTER)}

    def restore(self, stored: Mapping[str, Stored]) -> None:
        """Take on the stored form; the tensors are kept, not copied."""
        put_tensors(self, {name: t for name, t in stored.items() if isinstance(t, Tensor)})
        for module in self.modules():
            if COUNTER in module._buffers:
                module._buffers[COUNTER] = torch.zeros((), dtype=torch.int64)


class Transform(Part, ABC):
    """One site's state: W -> W~, to the same bits in both forms."""

    # In training mode `output` stands for `weight`; in eval mode both would give the same.
    acts_on_output: ClassVar[bool] = False
    adapts: ClassVar[bool] = True  # not where it only carries what all domains share

    def begin(self, base_weight: Tensor) -> None:
        """Look at W once, when a domain is new."""

    @abstractmethod
    def weight(self, base_weight: Tensor) -> Tensor:
        """W~ from W, of the same shape and type."""

    def write(self, base_weight: Tensor, out: Tensor) -> Tensor:
        """W~ in memory that is there already; for inference, with no gradient."""
        return out.copy_(self.weight(base_weight))

    def bias(self, base_bias: Tensor | None) -> Tensor | None:
        """A bias for the site, from the base's (None where it has none); None changes nothing."""
        return None

    def layer_weight(self, base_weight: Tensor) -> Tensor:
        """What the layer works with where `output` acts on what comes out of it."""
        return base_weight

    def output(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """What follows instead of the layer's outputs, in training mode."""
        raise NotImplementedError

    def compact(self, layer: nn.Module) -> nn.Module | None:
        """A smaller layer in place of a merged one, where weights of it are dropped for good."""
        return None

    def origins(self, base_weight: Tensor, base_bias: Tensor | None) -> list[tuple[nn.Parameter, Tensor]]:
        """Learned changes of whole weights, and what each is added to: decay acts on the sum."""
        return []

    def mask(self) -> Tensor | None:
        """The mask as a boolean tensor, where there is one."""
        return None

    def scalars(self) -> Mapping[str, Tensor]:
        """The few numbers beside a mask, by name, where there are some."""
        return {}

    def flipped(self) -> int | None:
        """How many bits of a learned mask are not as they started; None where that is not known."""
        return None


class MaskTransform(Transform):
    """A site with a mask: scores while it learns, bits (32 to a word, on the device) once it is stored."""

    components: ClassVar[Mapping[str, str]] = {"mask": "mask"}

    scores: nn.Parameter | None
    words: Tensor | None
    shape: tuple[int, ...]  # of the mask

    @abstractmethod
    def mask_of(self, scores: Tensor) -> Tensor:
        """The mask that scores stand for, a boolean tensor."""

    def bits(self) -> Bits:
        """The mask in its stored form."""
        return Bits.of(self.mask()) if self.words is None else Bits(self.words, self.shape)

    def mask(self) -> Tensor:
        """The mask as a boolean tensor."""
        return self.bits().unpack() if self.scores is None else self.mask_of(self.scores.detach())

    def score_parameters(self) -> list[nn.Parameter]:
        """The scores, while there are some."""
        return [] if self.scores is None else [self.scores]

    def stored(self) -> dict[str, Stored]:
        """The mask's bits."""
        return {"mask": self.bits()}

    def restore(self, stored: Mapping[str, Stored]) -> None:
        """Drop the scores and keep the bits."""
        bits = stored["mask"]
        assert isinstance(bits, Bits)
        self.words, self.scores = bits.words, None


class Route(Part, ABC):
    """How images go through the base, where their activations decide.

    So a domain cannot be merged, and its method says so (`mergeable`).
    """

    @abstractmethod
    def features(self, base: "Base", weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """What the head sees; `weights` are the domain's, and modes are set."""


class Objective(nn.Module, ABC):
    """What a method adds to the loss; its parameters, if any, learn with the head's."""

    @abstractmethod
    def forward(self, images: Tensor, features: Tensor) -> Tensor:
        """The addition, a number, for one batch and what the head sees of it."""


class OptionChecks:
    """For every method: values of options that make no sense are refused by name."""

    def check_choice(self, option: str, allowed: tuple[object, ...]) -> None:
        """Raise unless the option's value is one of those allowed."""
        value = getattr(self, option)
        if value not in allowed:
            raise MethodError(f"{option}={value!r} is not one of {', '.join(map(str, allowed))}")

    def check_range(self, option: str, low: float, high: float) -> None:
        """Raise unless the option is a number in [low, high]."""
        value = getattr(self, option)
        if not isinstance(value, int | float) or not low <= value <= high:
            raise MethodError(f"{option}={value!r} must be a number from {low:g} to {high:g}")

    def check_whole(self, option: str, low: int = 1, high: int | None = None) -> None:
        """Raise unless the option is a whole number from `low` on."""
        value, top = getattr(self, option), "" if high is None else f" to {high}"
        if type(value) is not int or value < low or (high is not None and value > high):
            raise MethodError(f"{option}={value!r} must be a whole number from {low}{top or ' on'}")

    def check_flags(self, *options: str) -> None:
        """Raise unless the options are true or false."""
        for option in options:
            if not isinstance(value := getattr(self, option), bool):
                raise MethodError(f"{option}={value!r} must be true or false")

    def check_interval(self, option: str) -> None:
        """Raise unless the option is two numbers, low and high; keep it as a tuple of floats."""
        value = getattr(self, option)
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if not is_pair or not all(isinstance(end, int | float) for end in value):
            raise MethodError(f"{option}={value!r} must be a range (low, high)")
        object.__setattr__(self, option, tuple(map(float, value)))
        if not value[0] <= value[1]:
            raise MethodError(f"{option}={value!r} must be a range (low, high)")


class InStages:
    """For methods that learn in stages; `fit` runs them, within one budget of epochs."""

    head_share: ClassVar[float] = 0.0  # of the epochs, at first, in which only the head learns

    @property
    def stages(self) -> tuple[Stage, ...]:
        """How training is shared out: the shares are of one budget of epochs, and add up to 1."""
        return (Stage(1.0),)

    def next_stage(self, base: "Base", domain: "Domain", images: Images) -> "Domain | None":
        """What learns next, made of a domain that has learned and is in its stored form.

        None, the default, ends training. `stages` says how the epochs are shared out.
        """
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

    name: str

    def check_own(self, given: bool) -> None:
        """Raise where the method cannot do without the base's own images and has none."""
        if self.needs_own and not given:
            raise MethodError(
                f"{self.name or type(self).__name__} trains the base on its own images first, and "
                "there are none: give them (fit_all(..., own=), or the folder of the base's own "
                "domain in a benchmark's data), or take another method"
            )

    @property
    def alone(self) -> bool:
        """Whether a domain depends on no other, so that each can be learned apart."""
        return not (self.ordered or self.joint or self.settles)

    def for_domains(self, domains: int) -> "Method":
        """The method for the last of so many domains, the base's own counted."""
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
        """What becomes of all domains once the last has learned; those that can learn go on."""
        return domains

    def moved(self, base: "Base", domains: Sequence["Domain"]) -> dict[str, Tensor]:
        """What became of the base's own tensors, by name, where the method moves them."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Method(OptionChecks, InStages, AmongDomains, ABC):
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

    title: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    differences: ClassVar[str] = ""  # from the original: a page of the documentation shows it
    mergeable: ClassVar[bool] = True
    leaves_sites: ClassVar[bool] = False  # norms and head are all that a domain learns
    wider: ClassVar[Mapping[str, Any]] = {}  # options that reach more of a base's sites
    unnamed: ClassVar[Mapping[str, Any]] = {}  # newer options, as packs that lack them mean them
    retired: ClassVar[tuple[str, ...]] = ()  # options of earlier versions, which packs may have

    def __post_init__(self) -> None:
        self.check_choice("norms", NORM_POLICIES)
        momentum = self.norm_momentum
        is_number = isinstance(momentum, int | float)
        if momentum is not None and not (is_number and 0 < momentum <= 1):
            raise MethodError(f"norm_momentum={momentum!r} must be in (0, 1], or None")
        if momentum is not None:
            object.__setattr__(self, "norm_momentum", float(momentum))
        self.check_flags("norm_reestimate")

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

    def objective(self, base: "Base", domain: "Domain", images: Images) -> Objective | None:
        """What is added to the loss while `domain` learns from `images`."""
        return None

    def options(self) -> dict[str, Any]:
        """The options, without the name: `create_method(name, **options)` gives them back."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
