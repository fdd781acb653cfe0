"""A base: a frozen pretrained network, and how to feed it."""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from polymask.core.input import InputSpec
from polymask.core.network import (
    copy_with,
    digest_tensors,
    exchange_tensors,
    features_of,
    named_tensors,
    put_module,
    structural_copy,
    trains_channels_last,
)
from polymask.core.survey import Norm, Site, survey
from polymask.errors import BaseError, InputError, near_matches

Momentum = float | Literal["cumulative"] | None  # of norm statistics
Hook = Callable[[nn.Module, tuple[Any, ...], Any], Any]


class Base:
    """A frozen network whose output is features, the sites of it, and how to feed it.

    The network is a structural copy of the one given: its tensors are shared, its modules are not, its classifier is
    taken out and kept as `head`. It is always in eval mode; a domain in training sets modes for the length of one call.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        name: str,
        input: InputSpec,
        classifier: str | None = "auto",
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        self.name, self.input = name, input
        self.net = _frozen_copy(net)
        self._check_tensors()
        first = next((t for _, t in named_tensors(self.net)), torch.empty(0))
        blank = torch.zeros(1, *input.shape, device=first.device, dtype=_real(first))
        found = survey(self.net, blank)
        self.classifier = found.classifier if classifier == "auto" else classifier
        self.head: nn.Module | None = None
        self.feature_dim = found.output_shape[0] if len(found.output_shape) == 1 else None
        if self.classifier is not None:
            self._take_out_classifier(self.classifier)
        if classifier not in ("auto", None):
            survey(self.net, blank)  # the network may need the module that was named

        in_head = () if self.classifier is None else (f"{self.classifier}.",)
        self.all_sites = {n: site for n, site in found.sites.items() if not n.startswith(in_head)}
        self.sites: dict[str, Site] = _choose(self.all_sites, include, exclude)
        self.norms: dict[str, Norm] = found.norms
        self.trains_channels_last = trains_channels_last(self.net)
        self._tensors = dict(named_tensors(self.net))
        self._form = _without_values(self.net)
        self.fingerprint = "" if first.is_meta else fingerprint(self.net)
        self._responses: dict[tuple[int, ...], list[float]] = {}

    def __repr__(self) -> str:
        weights = sum(site.numel for site in self.sites.values())
        features = "feature maps" if self.feature_dim is None else f"{self.feature_dim:,} features"
        return (
            f"Base({self.name}: {len(self.sites)} sites with {weights:,} weights, input {self.input.size}, {features}, "
            f"on {self.device}, fingerprint {self.fingerprint[:12]}…)"
        )

    @property
    def device(self) -> torch.device:
        """Where the network's tensors are."""
        return next((t.device for t in self._tensors.values()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the images that the network takes: that of its first tensor."""
        return _real(next(iter(self._tensors.values()), torch.empty(0)))

    @property
    def weight_dtype(self) -> torch.dtype:
        """The type of the network's weights: that of its first site."""
        return next((self.tensor(name).dtype for name in self.all_sites), torch.float32)

    def placed(self, images: Tensor) -> Tensor:
        """A batch as the network takes it: on its device, in its type."""
        if self.device.type == "cuda" and images.device.type == "cpu":  # what is pinned is copied beside the work
            images = images.pin_memory()
        return images.to(self.device, self.dtype, non_blocking=True)

    def tensor(self, name: str) -> Tensor:
        """The parameter or buffer with this state-dict name."""
        return self._tensors[name]

    def to(self, device: torch.device | str) -> Self:
        """Move the network, as `nn.Module.to` does."""
        return self.apply(lambda tensor: tensor.to(device))

    def apply(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Put `change(tensor)` in every tensor's place: a move to another device, say."""
        for module in (self.net, self.head):
            if module is not None:
                module._apply(change)  # type: ignore[no-untyped-call]
        self._tensors = dict(named_tensors(self.net))
        return self

    def relocate(self, moved: Mapping[str, Tensor]) -> None:
        """Take parameters with the same values from other memory from now on.

        Networks that share the ones that were here keep them: a thread may be running one.
        """
        fresh = {id(self._tensors[n]): nn.Parameter(tensor, requires_grad=False) for n, tensor in moved.items()}
        exchange_tensors(self.net, fresh)
        self._tensors = dict(named_tensors(self.net))

    def scratch_buffers(self, live_norms: Collection[str], replaced: Collection[str]) -> dict[str, Tensor]:
        """Copies of the buffers that a training pass might write to and that are not replaced."""
        return {
            name: buffer.clone()
            for name, buffer in self.net.named_buffers()
            if name not in replaced and self._runs_in_training(name.rpartition(".")[0], live_norms)
        }

    def run(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """The features of `images` with some of the network's tensors replaced by `weights`."""
        named = dict(weights)
        return self.feed(lambda x: torch.func.functional_call(self.net, named, (x,)), images)

    def feed(self, net: Callable[[Tensor], Any], images: Tensor) -> Tensor:
        """What `net`, a network of this base's kind, says of a batch that the base can take.

        Where the network gives feature maps (a dict, list or tuple), it is these, as they are.
        """
        self.check_images(images)
        try:
            return cast(Tensor, features_of(net(images.to(self.dtype))))
        except (RuntimeError, ValueError, AssertionError) as error:
            if tuple(images.shape[1:]) == self.input.shape:
                raise
            raise InputError(
                f"base {self.name} does not take images of shape {tuple(images.shape[1:])}: "
                f"{error}; it was made for {self.input.shape}"
            ) from error

    @contextmanager
    def hooked(self, hooks: Mapping[str, Hook]) -> Iterator[None]:
        """`hook(module, inputs, output)` after each named module runs; what it gives replaces."""
        modules = dict(self.net.named_modules())
        before = {name: modules[name]._forward_hooks for name in hooks}
        try:
            for name, hook in hooks.items():
                # torch.compile can trace a new dictionary, but not register_forward_hook.
                ours = (-1 - len(before[name]), hook)
                modules[name]._forward_hooks = OrderedDict([*before[name].items(), ours])
            yield
        finally:
            for name, others in before.items():
                modules[name]._forward_hooks = others

    @contextmanager
    def training(self, live_norms: Collection[str], momentum: Momentum = None) -> Iterator[None]:
        """Training mode for everything but the norms that are not `live_norms`.

        `momentum` is that of the live norms' statistics: None leaves it as the network has it,
        "cumulative" averages over all batches seen since the statistics were reset.
        """
        before: list[tuple[nn.Module, str, object]] = []
        try:
            for name, module in self.net.named_modules():
                if not self._runs_in_training(name, live_norms):
                    continue
                before.append((module, "training", module.training))
                module.training = True
                if name in live_norms and momentum is not None and isinstance(module, _NormBase):
                    before.append((module, "momentum", module.momentum))
                    module.momentum = momentum if isinstance(momentum, float) else None
            yield
        finally:
            for module, attribute, value in before:
                setattr(module, attribute, value)

    def verify(self) -> None:
        """Raise unless every tensor of the network is byte for byte what it was at loading."""
        now = fingerprint(self.net)
        if now != self.fingerprint:
            raise BaseError(
                f"base {self.name} has changed since it was loaded (fingerprint {self.fingerprint[:12]}…, now "
                f"{now[:12]}…); something wrote to its tensors: load it again"
            )

    @torch.no_grad()
    def response(self, shape: tuple[int, ...]) -> list[float]:
        """What the network makes of one fixed image, in a few numbers; none on the meta device.

        The fingerprint covers tensors. Networks with the same tensors may still differ in a norm's eps, an activation
        or a padding: these numbers tell them apart.
        """
        if shape not in self._responses and self.fingerprint:
            pixels = torch.arange(math.prod(shape), device=self.device, dtype=torch.float32)
            image = (0.37 * pixels).sin().view(1, *shape)  # nothing random: it is the same everywhere
            net = copy_with(self._form, self._tensors)  # another thread may be running `net` with other tensors
            found = features_of(net(image.to(self.dtype)))
            maps = found.values() if isinstance(found, Mapping) else [found] if isinstance(found, Tensor) else found
            values = torch.cat([one.flatten().float().cpu() for one in maps])
            some = torch.linspace(0, len(values) - 1, min(16, len(values)), device="cpu").long()
            self._responses[shape] = [float(f"{value:.6g}") for value in values[some].tolist()]
        return self._responses.get(shape, [])

    def check_images(self, images: Tensor) -> None:
        """Raise unless `images` is a batch that this base can take."""
        channels, dims = self.input.shape[0], len(self.input.shape)
        shape = ", ".join(map(str, self.input.shape))
        remedy = f"give a batch of float images (N, {shape}), as input.transform() makes them"
        if images.ndim != dims + 1 or images.shape[1] != channels:
            raise InputError(f"images have shape {tuple(images.shape)}; {remedy}")
        if not images.is_floating_point():
            raise InputError(
                f"images are {images.dtype}; {remedy}: pixels in [0, 1], then "
                f"(pixel - {self.input.mean}) / {self.input.std}"
            )
        if images.device != self.device:
            raise InputError(
                f"images are on {images.device}, base {self.name} on {self.device}; move one of them with .to(device)"
            )

    def _runs_in_training(self, module: str, live_norms: Collection[str]) -> bool:
        return module not in self.norms or module in live_norms

    def _check_tensors(self) -> None:
        for name, tensor in named_tensors(self.net):
            if not tensor.is_meta and tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise BaseError(
                    f"{name} of base {self.name} holds values that are not finite; use an intact checkpoint"
                )

    def _take_out_classifier(self, name: str) -> None:
        modules = dict(self.net.named_modules())
        if name not in modules or not name:
            near = near_matches(name, modules)
            raise BaseError(f"base {self.name} has no module {name!r} to take as its classifier; {near}")
        head = modules[name]
        size = getattr(head, "in_features", None) or getattr(head, "in_channels", None)
        if size is None:
            raise BaseError(
                f"{name} of base {self.name} is a {type(head).__name__}; the classifier must be "
                "a Linear or a convolution, which knows the number of its input features"
            )
        self.head, self.feature_dim = head, int(size)
        put_module(self.net, name, nn.Identity().eval())


def fingerprint(module: nn.Module) -> str:
    """sha256 over the names, types, shapes and bytes of a state dict, in order of names."""
    return digest_tensors(module.state_dict())


def _frozen_copy(net: nn.Module) -> nn.Module:
    """A structural copy in eval mode, its parameters new objects over the same memory."""
    fresh: dict[int, Tensor] = {}
    for name, parameter in net.named_parameters():
        if is_lazy(parameter):
            raise BaseError(f"{name} of the network has no shape yet; run the network once first")
        fresh[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    return structural_copy(net, fresh).eval()


def _without_values(net: nn.Module) -> nn.Module:
    """A structural copy whose tensors are on the meta device."""
    return structural_copy(net, {id(tensor): tensor.to("meta") for _, tensor in named_tensors(net)})


def _real(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()


def _choose(sites: Mapping[str, Site], include: Sequence[str], exclude: Sequence[str]) -> dict[str, Site]:
    for pattern in (*include, *exclude):
        if not any(_matches(name, [pattern]) for name in sites):
            raise BaseError(f"no site matches {pattern!r}; " + near_matches(pattern, sites))
    chosen = {n: site for n, site in sites.items() if not include or _matches(n, include)}
    return {n: site for n, site in chosen.items() if not _matches(n, exclude)}


def _matches(site: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in (site, site.rpartition(".")[0]) for pattern in patterns)
