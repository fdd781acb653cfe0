"""A domain: a function of the base's weights, and a head.

domain.weights(base) -> {state-dict name: tensor}
logits = domain.head(functional_call(base.net, domain.weights(base), (images,)))
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from polymask.core.base import Base, Momentum
from polymask.core.heads import LearningHead, head_tensors, stored_head
from polymask.core.merge import merge
from polymask.core.method import Method
from polymask.core.network import put_tensors, structural_copy
from polymask.core.parts import GATHERING, OwnNorm, Part, Route, Stored, Transform, own_norms
from polymask.core.survey import Site
from polymask.core.target import CLASSES, Target
from polymask.core.unknown import Judgement, ScoredHead, Unknown
from polymask.errors import DomainError

LIKENESS = "likeness"  # the note of `recipe` that says what a domain's images look like to the base
START = "start"  # and the one that says which domain it began as


class Domain(nn.Module):
    """All that one domain owns: transforms of sites, norm layers, a head, and class names.

    Its parameters are what it learns. In training mode it puts its own norms and the network's dropout in training
    mode for the length of a call. `target` says what the head's outputs mean. `unknown` tells images that it never
    learned (None where nothing is kept for that). `recipe` and `metrics` are notes (JSON values) that travel in its
    pack.
    """

    def __init__(
        self, base: Base, method: Method, classes: Sequence[str] | None, sites: Mapping[str, Site] | None = None
    ) -> None:
        super().__init__()
        self.sites = dict(base.sites if sites is None else sites)
        self.method = method
        self.base_name, self.fingerprint, self.input = base.name, base.fingerprint, base.input
        self.base_response = {"shape": list(base.input.shape), "values": base.response(base.input.shape)}
        self.classes = None if classes is None else check_classes(classes)
        self.target: Target = CLASSES
        self.unknown: Unknown | None = None
        self.gathers_statistics = True  # in training mode; not where the images are only a part of the domain's
        self.recipe: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}

        transforms = {name: method.transform(site) for name, site in self.sites.items()}
        self.transforms = nn.ModuleDict({_module_key(name): t for name, t in transforms.items() if t is not None})
        self.route: Part | None = method.route(base) or method.carry(base)
        norms = own_norms(base, method.norms)
        self.norms = nn.ModuleDict({_module_key(name): norm for name, norm in norms.items() if norm.tensors()})
        self.head: nn.Linear | None = None
        if self.classes is not None:
            if base.feature_dim is None:
                raise DomainError(
                    f"base {base.name} does not give one feature vector an image, so it takes no linear head; give it "
                    "pooled features, or make the domain with classes=None"
                )
            self.head = method.head(base.feature_dim, len(self.classes), base.weight_dtype)

    def __repr__(self) -> str:
        names = self.classes or []
        some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        classes = "no classes" if self.classes is None else f"{len(names)} {self.target.kind} ({some})"
        tested = self.metrics.get(f"test_{self.target.metric}")
        test = f", {self.target.title} {self.target.text(tested)} on test" if isinstance(tested, int | float) else ""
        return f"Domain({self.method.name} on {self.base_name}: {classes}, input {self.input.size}{test})"

    def weights(self, base: Base, made: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The tensors that this domain puts in place of the base's, by state-dict name.

        `made` are weights of sites that are there already, and are not computed again.
        """
        self.check_base(base)
        weights = dict(self.method.together(base, self) if made is None else made)
        for name, transform in self.named_transforms():
            if self.training and transform.acts_on_output:
                weights[name] = transform.layer_weight(base.tensor(name))
                continue
            site = self.sites[name]
            if name not in weights and not transform.keeps_weight:
                weights[name] = transform.weight(base.tensor(name))
            bias = transform.bias(base.tensor(site.bias) if site.has_bias else None)
            if bias is not None:
                weights[site.bias] = bias
        for _, own in self.named_norms():
            weights |= own.in_layer(base)
        return weights

    def features(self, base: Base, images: Tensor, *, momentum: Momentum = None) -> Tensor:
        """What the head sees: the base's output with this domain's weights."""
        weights = self.weights(base)
        run = partial(self.route.features, base) if isinstance(self.route, Route) else base.run
        if not self.training:
            return run(weights, images)
        live = self.live_norms()
        # A module in training mode may write to its buffers; the base's are not to be written.
        weights |= base.scratch_buffers(live, weights)
        acting = {name: transform for name, transform in self.named_transforms() if transform.acts_on_output}
        hooks = {name.rpartition(".")[0]: partial(_replace_output, transform) for name, transform in acting.items()}
        with base.training(live, momentum or self.method.norm_momentum), base.hooked(hooks):
            return run(weights, images)

    def forward(self, base: Base, images: Tensor) -> Tensor:
        """What the head says of images (N, C, H, W), logits (N, classes); features where there is no head."""
        return self.classify(self.features(base, images))

    def classify(self, features: Tensor) -> Tensor:
        """What the head says of features; the features where there is no head."""
        return features if self.head is None else cast(Tensor, self.head(features))

    @property
    def judgement(self) -> Judgement | None:
        """How it tells unknown images; None where it does not."""
        return None if self.unknown is None else self.unknown.judgement

    @property
    def likeness(self) -> Any:
        """The note of what its images look like to the base, as its pack has it; None where there is none."""
        return self.recipe.get(LIKENESS)

    def scored(self) -> Self:
        """The domain with a head that gives a score after an image's logits; itself where it keeps nothing for one."""
        if self.unknown is None or self.head is None:
            return self
        copied = structural_copy(self)
        assert copied.head is not None
        assert copied.unknown is not None
        copied.head, copied.unknown = ScoredHead(copied.head, copied.unknown), None
        return copied.eval()

    def named_transforms(self) -> Iterator[tuple[str, Transform]]:
        """(site name, transform), in the base's order."""
        for key, module in self.transforms.items():
            yield _name_of(key), cast(Transform, module)

    def named_parts(self) -> Iterator[tuple[str, Part]]:
        """(place in a pack, part): the transforms, then the route, or what is carried for the next domain."""
        for name, transform in self.named_transforms():
            yield f"transform/{name}", transform
        if self.route is not None:
            yield "route", self.route

    def named_norms(self) -> Iterator[tuple[str, OwnNorm]]:
        """(norm layer's name, own tensors)."""
        for key, module in self.norms.items():
            yield _name_of(key), cast(OwnNorm, module)

    def live_norms(self) -> set[str]:
        """The norm layers that run in training mode while this domain learns."""
        keeps_statistics = self.gathers_statistics and self.method.norms in GATHERING
        return {name for name, _ in self.named_norms()} if keeps_statistics else set()

    def param_groups(self) -> dict[str, list[nn.Parameter]]:
        """What is learned, by part.

        "transforms" has scores, scalars and adapters, "weights" what is learned of whole weights, "norms" scales and
        shifts, "head" the classifier.
        """
        groups: dict[str, list[nn.Parameter]] = {"transforms": [], "weights": []}
        for _, part in self.named_parts():
            whole = {id(p) for p in part.weight_parameters()}
            for parameter in part.parameters():
                groups["weights" if id(parameter) in whole else "transforms"].append(parameter)
        groups["norms"] = list(self.norms.parameters())
        groups["weights"] += self.head.weight_parameters() if isinstance(self.head, LearningHead) else []
        mapped = {id(p) for p in groups["weights"]}
        groups["head"] = [] if self.head is None else [p for p in self.head.parameters() if id(p) not in mapped]
        return {name: [p for p in group if p.requires_grad] for name, group in groups.items()}

    @torch.no_grad()
    def reestimate_norms(self, base: Base, batches: Iterable[Tensor]) -> None:
        """Replace own norm statistics by their average over `batches` of training images."""
        if not self.live_norms():
            return
        for module in self.modules():
            if isinstance(module, OwnNorm):  # a route may have some too
                module.reset_statistics()
        with self.in_mode(training=True):
            for images in batches:
                self.features(base, images, momentum="cumulative")

    def stored(self) -> dict[str, Stored]:
        """Everything that a pack keeps, by name."""
        stored: dict[str, Stored] = {}
        for place, part in self._stored_parts():
            stored |= {f"{place}/{n}": t for n, t in part.stored().items()}
        if self.head is not None:
            stored |= {f"head/{n}": tensor for n, tensor in head_tensors(self.head).items()}
        return stored

    def beside(self) -> set[str]:
        """The names of stored tensors that domains share, and that are kept once in a file beside their packs."""
        return {f"{place}/{name}" for place, part in self.named_parts() for name in part.beside}

    def restore(self, stored: Mapping[str, Stored]) -> Self:
        """Take on the stored form: masks become bits, nothing is learned any more.

        The names and shapes must be those of `stored()`; the tensors are kept, not copied.
        """
        parts: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, tensor in stored.items():
            place, _, leaf = name.rpartition("/")
            parts[place][leaf] = tensor
        for place, part in self._stored_parts():
            part.restore(parts[place])
        if self.head is not None:
            self.head = stored_head(self.head)
            put_tensors(self.head, parts["head"])
        return self.requires_grad_(False).eval()

    def _stored_parts(self) -> Iterator[tuple[str, Part]]:
        yield from self.named_parts()
        yield from ((f"norm/{name}", norm) for name, norm in self.named_norms())
        if self.unknown is not None:
            yield "unknown", self.unknown

    def frozen(self) -> Self:
        """A copy in the stored form; the original may learn on without changing it."""
        shared = self.beside()
        stored = {n: t.clone() if isinstance(t, Tensor) and n not in shared else t for n, t in self.stored().items()}
        return structural_copy(self).restore(stored)

    def save(self, path: str | Path) -> None:
        """Write the domain's pack: the whole file or nothing."""
        from polymask.pack.storing import save_domain

        save_domain(self, path)

    def merged(self, base: Base, *, compact: bool = False) -> nn.Module:
        """An ordinary network that gives this domain's logits.

        A structural copy of the base: every tensor that the domain does not change is shared with it, the head stands
        where the base's classifier stood. Nothing is shared with the domain, which may learn on. `compact` leaves out
        what the domain does not use (channels that it switched off), so layers get smaller, and logits differ in
        rounding.
        """
        return merge(self, base, compact=compact)

    @contextmanager
    def in_mode(self, *, training: bool) -> Iterator[None]:
        """Training or eval mode, and back to the mode that was."""
        if self.training == training:  # going through all modules takes its time
            yield
            return
        self.train(training)
        try:
            yield
        finally:
            self.train(not training)

    def rebuilt(self, base: Base, method: Method) -> Self:
        """A new domain by another method, with this one's norms and head."""
        other = type(self)(base, method, self.classes, self.sites).to(base.device)
        other.begin(base)
        other.input, other.target = self.input, self.target
        other.norms.load_state_dict(self.norms.state_dict())
        if self.head is not None and other.head is not None:
            other.head.load_state_dict(head_tensors(self.head))
        return other

    def begin(self, base: Base) -> None:
        """Let the transforms look at the base's weights, once."""
        for name, transform in self.named_transforms():
            transform.begin(base.tensor(name))

    def become(self, other: Self) -> None:
        """Take on everything that another domain is; both share its tensors from then on."""
        for name in ("method", "sites", "input", "classes", "target", "recipe", "metrics"):
            setattr(self, name, getattr(other, name))
        self.transforms, self.route, self.norms, self.head = other.transforms, other.route, other.norms, other.head
        self.unknown = other.unknown
        self.train(other.training)

    def check_base(self, base: Base) -> None:
        """Raise unless `base` is the one that this domain was made for."""
        if base.fingerprint != self.fingerprint:
            raise DomainError(
                f"the domain was made for base {self.base_name} (fingerprint {self.fingerprint[:12]}…), this base is "
                f"{base.name} ({base.fingerprint[:12]}…); use the base that it was trained on, or retrain"
            )


def _replace_output(transform: Transform, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return transform.output(inputs[0], output)


def _module_key(name: str) -> str:
    # Names of submodules hold no dots, and must not be those of a ModuleDict's own attributes.
    return ":" + name.replace(".", "/")


def _name_of(key: str) -> str:
    return key.removeprefix(":").replace("/", ".")


def check_classes(classes: Sequence[str]) -> list[str]:
    """The class names as a list; raise unless they are distinct, non-empty strings."""
    names = list(classes)
    if isinstance(classes, str) or not names or not all(isinstance(c, str) and c for c in names):
        raise DomainError("classes must be a list of non-empty names, one per class")
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise DomainError(f"class names must be distinct; {', '.join(repeated[:5])} occur twice")
    return names
