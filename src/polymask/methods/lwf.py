"""Learning without forgetting: a domain learns, and says of its images what was said before.

    L = CE(new) + weight * sum over old heads of KL(softmax(z'/T) || softmax(z/T))

z' are an old head's logits before this domain was learned, z those of the same head now, both on
the new domain's images; the KL divergence is summed over classes and averaged over images, without
a factor T². (The original code has kl_div's mean over all N C elements times C, which is that.)
The base's own classifier is the first old head, and the heads of earlier domains are the others.

For the first quarter of the epochs only the new head learns. Then all do: the network, and the
heads of the earlier domains, which replace theirs in the end. The base's own classifier does not
learn. A base without one has nothing to say before the first domain, which is fine-tuned.

The norms keep the base's statistics (`affine`). Own statistics follow each domain's images while what the old heads say
is compared on these same images alone: no term of L sees that they no longer fit the images of before.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymask.core.heads import linear_head
from polymask.core.method import Images, Method
from polymask.core.network import structural_copy
from polymask.core.parts import NormPolicy, Objective, Part
from polymask.core.survey import learned_type
from polymask.errors import MethodError
from polymask.methods.shared_weights import SharedWeightsMethod, Snapshot, own_classifier

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain


_MANY = 1 << 20  # classes


@dataclass(frozen=True, kw_only=True)
class Lwf(SharedWeightsMethod):
    """CE(new) + weight * sum over old heads of KL(softmax(z'/T) || softmax(z/T)).

    `temperature` is T. `old_classes` are the numbers of classes of the domains learned before,
    whose heads learn along; training sets it.
    """

    norms: NormPolicy = "affine"
    temperature: float = 2.0
    weight: float = 1.0
    old_classes: tuple[int, ...] = ()

    title: ClassVar[str] = "learning without forgetting"
    reference: ClassVar[str] = "arXiv 1606.09282"
    differences: ClassVar[str] = (
        "The reimplementation that the tables cite also trains the base's own classifier; here it is distilled but "
        "does not learn. Heads of earlier domains do, and replace theirs in the end. No weight decay acts while only "
        "the new head learns. With own norms the statistics move outside of the loss, and earlier domains forget by "
        "that alone, so `norms` is `affine`. The networks of the paper "
        "have no batch norms."
    )
    head_share: ClassVar[float] = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("temperature", 0.01, 1000)
        self.check_range("weight", 0, 1e6)
        counts = self.old_classes
        if not isinstance(counts, list | tuple) or not all(isinstance(n, int) and 0 < n < _MANY for n in counts):
            raise MethodError(f"old_classes={counts!r} must be numbers of classes, each from 1 to {_MANY - 1:,}")
        object.__setattr__(self, "old_classes", tuple(counts))

    def carry(self, base: "Base") -> "OldHeads | None":
        return OldHeads(self, base) if self.old_classes else None

    def objective(self, base: "Base", domain: "Domain", images: Images) -> Objective | None:
        """The distillation, from the domain as it is before it learns."""
        own = own_classifier(base)
        heads = ([] if own is None else [own]) + _old_heads(domain)
        return Distillation(self, base, domain, heads) if heads and self.weight else None

    def after(self, earlier: Sequence["Domain"]) -> "Lwf":
        return replace(self, old_classes=tuple(len(domain.classes or ()) for domain in earlier))

    def follow(self, domain: "Domain", earlier: Sequence["Domain"]) -> None:
        """Start where the last one ended, with the earlier domains' heads as they are then."""
        super().follow(domain, earlier)
        mine, theirs = _old_heads(domain), _latest_heads(earlier)
        if [h.out_features for h in mine] != [h.out_features for h in theirs if h is not None]:
            raise MethodError(
                f"the domain has old heads for {domain.method.options()['old_classes']} classes, "
                "which are not those of the earlier domains; make it by method.after(earlier)"
            )
        for head, old in zip(mine, theirs, strict=True):
            head.load_state_dict(cast(nn.Linear, old).state_dict())

    def settle(self, base: "Base", domains: Sequence["Domain"]) -> "Sequence[Domain]":
        """Copies with all of the last domain, each with its own head as that has become."""
        latest = []
        for domain, head in zip(domains, _latest_heads(domains), strict=True):
            domain = structural_copy(domain)
            domain.method = replace(cast(Lwf, domain.method), old_classes=())
            domain.route = None
            domain.head = copy.deepcopy(head)
            latest.append(domain)
        return super().settle(base, latest)


class OldHeads(Part):
    """The heads of the earlier domains, one linear layer each, which go on learning."""

    learns_weights: ClassVar[bool] = True

    def __init__(self, method: Lwf, base: "Base") -> None:
        super().__init__()
        if base.feature_dim is None:
            raise MethodError(f"base {base.name} gives no feature vector that a head could read")
        self.heads = nn.ModuleList()
        for classes in method.old_classes:
            head = linear_head(base.feature_dim, classes, base.weight_dtype, device="meta")  # draws no numbers
            for name, parameter in list(head.named_parameters()):
                head.register_parameter(name, nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype)))
            self.heads.append(head)

    def component(self, name: str) -> str:
        """In place of the earlier domains' own heads, to which they add nothing."""
        return "moved"


class Distillation(Objective):
    """weight * sum over heads of KL(softmax(z'/T) || softmax(z/T)), z' from where it began."""

    def __init__(self, method: Lwf, base: "Base", domain: "Domain", heads: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.temperature, self.weight, self.base = method.temperature, method.weight, base
        self.heads = tuple(heads)  # the base's and the domain's, not the objective's own
        self.network = Snapshot(domain.weights(base))
        self.classifiers = nn.ModuleList(Snapshot(head.state_dict()) for head in heads)

    def forward(self, images: Tensor, features: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.base.run(self.network.tensors(), images)
        total = features.new_zeros((), dtype=learned_type(features.dtype))
        for head, start in zip(self.heads, self.classifiers, strict=True):
            then = torch.func.functional_call(head, cast(Snapshot, start).tensors(), (before,))
            total = total + divergence(head(features), then, self.temperature)
        return self.weight * total


def divergence(now: Tensor, then: Tensor, temperature: float) -> Tensor:
    """KL(softmax(then/T) || softmax(now/T)) of logits (N, C), averaged over the N images."""
    wide = [logits.to(learned_type(logits.dtype)) for logits in (then, now)]
    p, q = (F.log_softmax(logits / temperature, 1) for logits in wide)
    return F.kl_div(q, p, reduction="batchmean", log_target=True)


def _old_heads(domain: "Domain") -> list[nn.Linear]:
    return [cast(nn.Linear, head) for head in domain.route.heads] if isinstance(domain.route, OldHeads) else []


def _latest_heads(domains: Sequence["Domain"]) -> list[nn.Linear | None]:
    """Each domain's head as the last domain left it."""
    old = _old_heads(domains[-1]) if domains else []
    return [*old, *(domain.head for domain in domains[len(old) :])]


PRESETS: dict[str, Method] = {"lwf": Lwf()}
