"""What a network is made of: its sites, its norms and its classifier, read off one forward pass.

The network runs once on a blank image under a `TorchFunctionMode` that sees every torch call with its very tensors. A
parameter of two or more dimensions that enters a convolution or a linear map is a site; a tensor that leaves one
carries the site's name until something other than reshaping, pooling or rectifying happens to it, so the norm that
reads it is the norm that follows the site, and the linear site whose name reaches the output is the classifier.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.overrides import TorchFunctionMode

from polymask.core.network import features_of, named_tensors
from polymask.errors import BaseError


def learned_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which something learns that stands for a tensor of type `dtype`.

    A step of training is often smaller than what separates two neighbours in half precision, where it would change
    nothing. So what learns is in float32 (float64 on a base of that type), and is cast where a layer needs another.
    """
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Site:
    """One weight tensor of the base that a method may transform."""

    name: str  # state-dict name of the weight
    shape: tuple[int, ...]
    kind: str  # conv1d, conv2d, conv3d, conv_transpose1d, …, linear, in_projection
    groups: int
    bias: str  # state-dict name of its bias
    has_bias: bool  # the base has one; a transform may give one to a convolution that has none
    norm: str | None  # the norm module that reads this site's output
    batch_norm: bool  # that norm is a batch norm: the output's scale does not matter
    dtype: torch.dtype
    own_output: bool = True  # its layer gives what the weight makes of an input, and no other layer reads the weight

    @property
    def numel(self) -> int:
        """Number of weights."""
        return torch.Size(self.shape).numel()

    @property
    def learned_dtype(self) -> torch.dtype:
        """The type in which something learns that stands for the weight."""
        return learned_type(self.dtype)

    @property
    def channels(self) -> int:
        """Number of output channels."""
        return torch.Size(self.channel_shape).numel()

    @property
    def depthwise(self) -> bool:
        """Whether every filter reads one channel, of several that there are."""
        return self.groups > 1 and self.inputs == 1

    @property
    def inputs(self) -> int:
        """Number of channels that one filter reads."""
        return self.shape[0] // self.groups if self.transposed else self.shape[1]

    @property
    def takes_bias(self) -> bool:
        """Whether a transform may give it a bias: the layer has one, or can be given one."""
        return self.has_bias or self.name.rpartition(".")[2] == "weight"

    @property
    def spatial(self) -> bool:
        """Whether it is a kernel larger than 1x1."""
        return any(side > 1 for side in self.shape[2:])

    @property
    def transposed(self) -> bool:
        """Whether it is the weight of a transposed convolution, (in, out / groups, …)."""
        return self.kind.startswith("conv_transpose")

    @property
    def channel_view(self) -> tuple[int, ...]:
        """A shape of the weight in which `channel_shape` broadcasts over it.

        Output channel (g, j) of a transposed convolution is spread over the rows of group g, so the groups get an axis
        of their own.
        """
        if not self.transposed:
            return self.shape
        inputs, outputs, *kernel = self.shape
        return (self.groups, inputs // self.groups, outputs, *kernel)

    @property
    def channel_shape(self) -> tuple[int, ...]:
        """The shape of one number per output channel, in `channel_view`."""
        if not self.transposed:
            return (self.shape[0],) + (1,) * (len(self.shape) - 1)
        return (self.groups, 1, self.shape[1]) + (1,) * (len(self.shape) - 2)


@dataclass(frozen=True)
class Norm:
    """One norm layer of the base: its module's name, and its own tensors' names inside it."""

    name: str
    affine: tuple[str, ...]  # usually weight, bias
    statistics: tuple[str, ...]  # running_mean, running_var, num_batches_tracked of a batch norm


@dataclass(frozen=True)
class Survey:
    """What one forward pass shows of a network."""

    sites: dict[str, Site]  # in order of execution
    norms: dict[str, Norm]
    classifier: str | None  # name of the linear module that makes the output
    output_shape: tuple[int, ...]  # of one image; () where it is several feature maps


_Function = Callable[..., Any]
_CONVOLUTIONS = [f"conv{kind}{d}d" for kind in ("", "_transpose") for d in (1, 2, 3)]
_LINEAR_MAPS: dict[_Function, str] = {F.linear: "linear"} | {getattr(torch, name): name for name in _CONVOLUTIONS}
_RESHAPES: set[_Function] = {F.dropout, F.dropout2d, Tensor.contiguous, Tensor.view}
_RESHAPES |= {getattr(home, name) for home in (torch, Tensor) for name in ("flatten", "permute", "reshape", "squeeze")}
_SCALE_KEEPING: set[_Function] = {torch.cat, torch.concat, torch.relu, torch.relu_, torch.max_pool2d, torch.mean}
_SCALE_KEEPING |= {Tensor.mean, F.relu, F.leaky_relu, F.pad}
_SCALE_KEEPING |= {getattr(F, f"{kind}_pool{d}d") for kind in ("avg", "adaptive_avg", "max") for d in (1, 2, 3)}
_ATTENTION_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True)
class _Origin:
    """The sites that a tensor comes from, and whether it is one's output up to its shape."""

    sites: frozenset[str]
    untouched: bool


class _Recorder(TorchFunctionMode):
    """Watches one forward pass and remembers which site each tensor comes from."""

    def __init__(self, names: Mapping[int, str], norm_of: Mapping[int, str]) -> None:
        super().__init__()
        self.names, self.norm_of = names, norm_of
        self.used: dict[str, str | None] = {}  # parameter name -> kind of linear map, if it is one
        self.maps: Counter[str] = Counter()  # parameter name -> linear maps that it entered as it is
        self.calls: Counter[str] = Counter()  # module name -> how often it ran
        self.followed_by: dict[str, str] = {}
        self.origins: dict[int, _Origin] = {}
        self.alive: list[Tensor] = []  # an id says nothing once its tensor is gone

    def __torch_function__(
        self,
        func: _Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors_in((*args, *kwargs.values()))
        incoming = [self.origins[id(t)] for t in tensors if id(t) in self.origins]
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            self._note_uses(tensors, None)
            return result
        self.alive.append(result)
        self.origins.pop(id(result), None)

        kind = _LINEAR_MAPS.get(func)
        norm = next((self.norm_of[id(t)] for t in tensors if id(t) in self.norm_of), None)
        weight = self._note_uses(tensors, kind)
        if weight is not None:
            self.origins[id(result)] = _Origin(frozenset([weight]), untouched=True)
        elif norm is not None:
            for origin in incoming:
                for site in origin.sites:
                    self.followed_by.setdefault(site, norm)
        elif incoming and (func in _RESHAPES or func in _SCALE_KEEPING):
            untouched = func in _RESHAPES and all(o.untouched for o in incoming)
            sites = frozenset[str]().union(*(o.sites for o in incoming))
            self.origins[id(result)] = _Origin(sites, untouched)
        return result

    def _note_uses(self, tensors: list[Tensor], kind: str | None) -> str | None:
        """Remember the parameters among `tensors`; name the weight if this is a linear map."""
        names = [self.names[id(t)] for t in tensors if id(t) in self.names]
        for name in names:
            self.used.setdefault(name, None)
        if kind is None or len(tensors) < 2 or id(tensors[1]) not in self.names:
            return None
        weight = self.names[id(tensors[1])]
        self.used[weight] = kind
        self.maps[weight] += 1
        return weight

    @contextmanager
    def counting(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Count how often each module runs."""
        watched = [m.register_forward_hook(lambda *_, name=n: self.calls.update([name])) for n, m in modules.items()]
        try:
            yield
        finally:
            for handle in watched:
                handle.remove()


def survey(net: nn.Module, blank: Tensor) -> Survey:
    """Run `net` once on `blank`, a batch of one, and say what it is made of."""
    modules = dict(net.named_modules())
    for name in modules:
        if "/" in name:
            raise BaseError(f"the module {name!r} has a slash in its name; rename it")
    norms = {name: norm for name, module in modules.items() if name and (norm := _norm(name, module)) is not None}
    norm_of = {id(tensor): name for name in norms for _, tensor in named_tensors(modules[name])}
    recorder = _Recorder({id(p): name for name, p in net.named_parameters()}, norm_of)
    with torch.no_grad(), recorder, recorder.counting(modules):
        try:
            output = features_of(net(blank))
        except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
            raise BaseError(
                f"the network does not run on an input of shape {tuple(blank.shape[1:])}: {error}; "
                "pass load_base(..., input=InputSpec(shape=(channels, height, width), ...))"
            ) from error

    sites = {name: site for name in recorder.used if (site := _site(net, name, recorder)) is not None}
    shape = tuple(output.shape[1:]) if isinstance(output, Tensor) else ()
    return Survey(sites, norms, _classifier(net, recorder, output), shape)


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(_tensors_in(value))
    return found


def _norm(name: str, module: nn.Module) -> Norm | None:
    affine = tuple(n for n, p in module._parameters.items() if p is not None)
    looks_like_norm = isinstance(module, _NormBase) or (
        "norm" in type(module).__name__.lower()
        and not module._modules
        and all(p.ndim <= 1 for p in module.parameters(recurse=False))
        and bool(affine)
    )
    if not looks_like_norm:
        return None
    statistics = tuple(n for n, b in module._buffers.items() if b is not None)
    return Norm(name, affine, statistics) if affine or statistics else None


def _site(net: nn.Module, name: str, recorder: _Recorder) -> Site | None:
    path, _, leaf = name.rpartition(".")
    module = net.get_submodule(path)
    weight = getattr(module, leaf)
    groups, bias = 1, f"{path}.bias".lstrip(".")
    if isinstance(module, nn.MultiheadAttention) and leaf in _ATTENTION_PROJECTIONS:
        kind, bias = "in_projection", f"{path}.in_proj_bias".lstrip(".")
    elif isinstance(module, _ConvNd) and leaf == "weight":
        transposed = "_transpose" if isinstance(module, _ConvTransposeNd) else ""
        kind, groups = f"conv{transposed}{weight.ndim - 2}d", module.groups
    elif isinstance(module, nn.Linear) and leaf == "weight":
        kind = "linear"
    elif recorder.used[name] is not None and weight.ndim >= 2:
        kind = str(recorder.used[name])  # a raw parameter, used by a functional call
    else:
        return None
    norm = recorder.followed_by.get(name)
    batch_norm = norm is not None and isinstance(net.get_submodule(norm), nn.modules.batchnorm._BatchNorm)
    shape = tuple(weight.shape)
    # Three separate attention projections share one bias, which then is nobody's own.
    tensor = dict(net.named_parameters()).get(bias)
    has_bias = tensor is not None and not leaf.startswith(("q_", "k_", "v_"))
    own_output = recorder.maps[name] == recorder.calls[path] > 0
    return Site(name, shape, kind, groups, bias, has_bias, norm, batch_norm, weight.dtype, own_output)


def _classifier(net: nn.Module, recorder: _Recorder, output: Any) -> str | None:
    origin = recorder.origins.get(id(output))
    if origin is None or not origin.untouched or len(origin.sites) != 1:
        return None
    module = next(iter(origin.sites)).removesuffix(".weight")
    is_linear = isinstance(dict(net.named_modules()).get(module), nn.Linear)
    return module if is_linear and output.ndim == 2 else None
