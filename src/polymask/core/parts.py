"""What a domain owns: transforms of sites, norm layers, routes and a head, and how they are stored."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from polymask.core.bits import Bits
from polymask.core.network import named_tensors, put_tensors
from polymask.core.survey import Norm, Site, learned_type
from polymask.errors import BaseError, MethodError

if TYPE_CHECKING:
    from polymask.core.base import Base

Stored = Tensor | Bits
NormPolicy = Literal["own", "shared", "affine", "stats", "bias", "shift"]
GATHERING: tuple[NormPolicy, ...] = ("own", "stats", "shift")  # policies with own statistics
COUNTER = "num_batches_tracked"  # of batch norms: matters while statistics are gathered, never afterwards


class Part(nn.Module):
    """Something that a domain owns: learned tensors, and the form in which they are stored.

    While training it holds what is learned; `restore` turns it into its stored form, which is what a pack keeps and
    what inference runs on. By default both are all parameters and buffers.
    """

    components: ClassVar[Mapping[str, str]] = {}  # what a stored tensor counts as in accounting
    stored_names: ClassVar[Mapping[str, str]] = {}  # of tensors that are stored under another name
    beside: ClassVar[tuple[str, ...]] = ()  # stored tensors that domains share: kept once, beside their packs
    learns_weights: ClassVar[bool] = False  # whole weights, which want smaller steps than scores
    # In its stored form it is what its stored tensors say at any time: others may be written to their memory.
    refillable: ClassVar[bool] = False

    def component(self, name: str) -> str:
        """What the stored tensor `name` counts as: by default as weights, or as a norm's statistics."""
        default = "norm_statistics" if name.rpartition(".")[2].startswith("running_") else "weights"
        return self.components.get(name, default)

    def weight_parameters(self) -> list[nn.Parameter]:
        """The parameters that are whole weights."""
        return list(self.parameters()) if self.learns_weights else []

    def score_parameters(self) -> list[nn.Parameter]:
        """The parameters that are scores, on which weight decay does not act."""
        return []

    def scalar_parameters(self) -> list[nn.Parameter]:
        """The parameters that are scalars of a site, which may have their own rate."""
        return []

    def stored(self) -> dict[str, Stored]:
        """All that must be kept: `Bits` at one bit an element, tensors as they are."""
        named = [*self.named_parameters(), *self.named_buffers()]
        return {self.stored_names.get(n, n): t.detach() for n, t in named if not n.endswith(COUNTER)}

    def relearn(self, rate: float) -> bool:
        """Turn the stored form into one that learns on, in steps of the size `rate`; False where it cannot be."""
        if type(self).restore is not Part.restore:
            return False
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        return True

    def begin_as(self, other: "Part", rate: float) -> None:
        """Begin where another domain's part is, and learn on from there in steps of the size `rate`."""
        theirs = other.stored() if type(other) is type(self) else {}
        if {n: t.shape for n, t in theirs.items()} != {n: t.shape for n, t in self.stored().items()}:
            raise MethodError("what the other domain has there is of another method, or of other options or sizes")
        self.restore({n: t.clone() if isinstance(t, Tensor) else t for n, t in theirs.items()})
        if not self.relearn(rate):
            raise MethodError("what the other domain has there cannot learn on from its stored form")

    def restore(self, stored: Mapping[str, Stored]) -> None:
        """Take on the stored form; the tensors are kept, not copied."""
        own_names = {stored_as: name for name, stored_as in self.stored_names.items()}
        put_tensors(self, {own_names.get(n, n): t for n, t in stored.items() if isinstance(t, Tensor)})
        for module in self.modules():
            if COUNTER in module._buffers:
                module._buffers[COUNTER] = torch.zeros((), dtype=torch.int64)


class Transform(Part, ABC):
    """One site's state: W -> W~, to the same bits in both forms."""

    # In training mode `output` stands for `weight`; in eval mode both would give the same.
    acts_on_output: ClassVar[bool] = False
    adapts: ClassVar[bool] = True  # not where it only carries what all domains share

    @property
    def keeps_weight(self) -> bool:
        """Whether W~ is W itself, which then is not made."""
        return False

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
        """The weight that the layer runs with where `output` acts on what comes out of it."""
        return base_weight

    def output(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """What replaces the layer's outputs, in training mode."""
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


class BiasTransform(Transform):
    """A site with a bias of its own where the base has one: b~ = b + d, with d (channels,) learned from zero."""

    delta_bias: nn.Parameter | None

    def begin_bias(self, site: Site) -> None:
        """Make d; called last, since parameters are learned and stored in the order in which they are made."""
        zeros = torch.zeros(site.channels, dtype=site.learned_dtype)
        self.register_parameter("delta_bias", nn.Parameter(zeros) if site.has_bias else None)

    def bias(self, base_bias: Tensor | None) -> Tensor | None:
        if base_bias is None or self.delta_bias is None:
            return None
        return (base_bias + self.delta_bias).to(base_bias.dtype)


class BitsTransform(Transform):
    """A site with a mask of bits, 32 to a word, on the device."""

    components: ClassVar[Mapping[str, str]] = {"mask": "mask"}

    words: Tensor | None
    shape: tuple[int, ...]  # of the mask

    def bits(self) -> Bits:
        """The mask in its stored form."""
        assert self.words is not None
        return Bits(self.words, self.shape)

    def mask(self) -> Tensor:
        return self.bits().unpack()

    def stored(self) -> dict[str, Stored]:
        return {"mask": self.bits()}

    def restore(self, stored: Mapping[str, Stored]) -> None:
        bits = stored["mask"]
        assert isinstance(bits, Bits)
        self.words = bits.words


class MaskTransform(BitsTransform):
    """A site with a mask that learns: scores, which are dropped for their bits once it is stored."""

    scores: nn.Parameter | None

    @abstractmethod
    def mask_of(self, scores: Tensor) -> Tensor:
        """The mask that scores stand for, a boolean tensor."""

    def bits(self) -> Bits:
        return Bits.of(self.mask()) if self.words is None else super().bits()

    def mask(self) -> Tensor:
        return super().mask() if self.scores is None else self.mask_of(self.scores.detach())

    def score_parameters(self) -> list[nn.Parameter]:
        return [] if self.scores is None else [self.scores]

    def restore(self, stored: Mapping[str, Stored]) -> None:
        super().restore(stored)
        self.scores = None


class Route(Part, ABC):
    """How images go through the base, where their activations decide.

    Such a domain cannot be merged, and its method says so (`mergeable`).
    """

    @abstractmethod
    def features(self, base: "Base", weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """What the head sees; `weights` are the domain's, and modes are set."""


class Objective(nn.Module, ABC):
    """What a method adds to the loss; its parameters, if any, learn with the head's."""

    @abstractmethod
    def forward(self, images: Tensor, features: Tensor) -> Tensor:
        """The addition, a number, for one batch and what the head sees of it."""


class Objectives(Objective):
    """Several additions to the loss."""

    def __init__(self, *parts: Objective) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, images: Tensor, features: Tensor) -> Tensor:
        return torch.stack([part(images, features) for part in self.parts]).sum()


class NormPlaces:
    """Which tensors of one norm layer are a domain's own, and how the layer takes them, whatever its precision.

    Torch's batch norms take halves as long as all of their tensors are in float32, so those that stay the base's are
    widened beside the own ones. Any other layer computes in the type of its tensors: own ones are cast to the base's.
    """

    def __init__(self, base: "Base", norm: Norm, policy: NormPolicy) -> None:
        both, shift = norm.affine, ("bias",)
        learned = {"own": both, "affine": both, "bias": shift, "shift": shift}.get(policy, ())
        self.affine = tuple(name for name in norm.affine if name in learned)
        self.statistics = norm.statistics if policy in GATHERING else ()
        layer = base.net.get_submodule(norm.name)
        self.widens = bool(norm.statistics) and isinstance(layer, _NormBase)
        self.names = {n: f"{norm.name}.{n}" for n in norm.affine + norm.statistics}  # in the network
        owned = {*self.affine, *self.statistics}
        self.widened = tuple(n for n in self.names if n not in owned) if self.widens else ()

    def type(self, base: "Base", name: str) -> torch.dtype:
        """The type in which the layer takes a tensor."""
        dtype = base.tensor(self.names[name]).dtype
        return learned_type(dtype) if self.widens and dtype.is_floating_point else dtype

    def in_layer(self, base: "Base", own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the layer runs with, by names in the network; `own` has those in the layer."""
        tensors = {}
        for name, tensor in own.items():
            dtype = self.type(base, name)
            tensors[self.names[name]] = tensor if tensor.dtype == dtype else tensor.to(dtype)
        for name in self.widened if own else ():
            theirs, dtype = base.tensor(self.names[name]), self.type(base, name)
            if theirs.dtype != dtype:
                tensors[self.names[name]] = theirs.to(dtype)
        return tensors


class OwnNorm(Part):
    """One norm layer's own scale and shift (parameters) and statistics (buffers)."""

    refillable: ClassVar[bool] = True

    def __init__(self, base: "Base", norm: Norm, policy: NormPolicy) -> None:
        super().__init__()
        self.places = NormPlaces(base, norm, policy)
        for name in self.places.affine:
            tensor = base.tensor(self.places.names[name])
            self.register_parameter(name, nn.Parameter(_copy(tensor, learned_type(tensor.dtype))))
        for name in self.places.statistics:
            # The layer writes to them, so they are kept in the type that it takes.
            self.register_buffer(name, _copy(base.tensor(self.places.names[name]), self.places.type(base, name)))

    def component(self, name: str) -> str:
        return "norm_statistics" if name in self._buffers else "norm_affine"

    def tensors(self) -> dict[str, Tensor]:
        """All of them by their names inside the norm layer."""
        own = [*self._parameters.items(), *self._buffers.items()]  # going through all modules takes its time
        return {name: tensor for name, tensor in own if tensor is not None}

    def in_layer(self, base: "Base") -> dict[str, Tensor]:
        """What the layer runs with, by names in the network."""
        return self.places.in_layer(base, self.tensors())

    def reset_statistics(self) -> None:
        """Forget the statistics: mean 0, variance 1, no batch seen."""
        for name, buffer in self.named_buffers():
            buffer.fill_(1 if name == "running_var" else 0)


def own_norms(base: "Base", policy: NormPolicy) -> dict[str, OwnNorm]:
    """The norm layers that are a domain's own, with the tensors that they start with; none where they are shared."""
    norms = {} if policy == "shared" else base.norms
    _check_apart(base, norms)
    return {name: OwnNorm(base, norm, policy) for name, norm in norms.items()}


def _check_apart(base: "Base", norms: Mapping[str, Norm]) -> None:
    """Raise where two norms share a tensor: a domain gives each its own."""
    seen: dict[int, str] = {}
    for name, norm in norms.items():
        for leaf, tensor in named_tensors(base.net.get_submodule(name)):
            if (other := seen.setdefault(id(tensor), name)) != name:
                apart = f"{name}.{leaf}.detach().clone()"
                apart = f"nn.Parameter({apart})" if leaf in norm.affine else apart
                raise BaseError(
                    f"the norms {other} and {name} of {base.name} share their {leaf}, and a domain gives each its own; "
                    f'untie them first: {name}.{leaf} = {apart}, or take norms="shared"'
                )


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of the base's tensor; on the meta device where a skeleton is being built."""
    if torch.empty(0).is_meta:
        return tensor.to("meta", dtype)
    return tensor.detach().to(dtype, copy=True)
