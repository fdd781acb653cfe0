"""A domain for other runtimes: its merged network as an ONNX file, or as a torch.export archive.

The file holds everything that its user must know: class names and how images are fed, as one JSON
object (`describe`). What was written is run beside the merged network, and must say the same.
"""

import copy
import io
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from polymask import __version__
from polymask.core.base import Base
from polymask.core.domain import Domain
from polymask.core.input import InputSpec
from polymask.core.merge import check_mergeable
from polymask.core.network import tensor_of
from polymask.data.cache import short_side
from polymask.errors import ExportError
from polymask.files import write_atomically

if TYPE_CHECKING:
    from torch.export import ExportedProgram

FORMATS = ("onnx", "torch-export")
KEY = "polymask"  # of the description in an ONNX file's metadata
NOTES = "polymask.json"  # the description among a torch.export archive's extra files
TOLERANCE = 1e-4
_BATCH = 16  # images that are checked at once
_ONNX_LIMIT = 2 << 30  # bytes of one protobuf message


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how far its network is from PyTorch's."""

    file: str
    format: str
    bytes: int
    opset: int | None  # of ONNX's operators
    checked_images: int  # 0 where nothing was checked
    difference: float | None  # of the logits; see `export_domain`
    description: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def export_domain(
    base: Base,
    domain: Domain,
    path: str | Path,
    format: str = "onnx",
    *,
    with_normalisation: bool = False,
    images: Tensor | None = None,
    check: bool = True,
    force: bool = False,
) -> Exported:
    """Write a domain's merged network for other runtimes: images (N, …) in, logits out, any N.

    The network takes float images that are scaled already, or `with_normalisation` the pixels themselves, uint8.
    `check` runs what was exported (onnxruntime, or torch.export's own loader) on `images`, uint8 pixels of the
    domain's shape (made ones where none are given), in batches and one alone; it is written only if

        max |logits - PyTorch's| <= 1e-4 max(1, max |PyTorch's|)

    A method that cannot be merged is refused, and so is a path that exists, without `force`.
    """
    path = Path(path)
    check_mergeable(domain)
    _check_request(path, format, check, force)
    pixels = _made_images(domain.input) if images is None else _checked_images(images, domain.input)
    net = domain.merged(base)
    if base.device.type != "cpu":  # a copy: the base shares its tensors with the merged network
        net = copy.deepcopy(net).cpu()
    if format == "onnx" and base.dtype.itemsize < 4:
        net = _with_norms_in(base.dtype, net)
    scale = Normalisation(domain.input, base.dtype)
    with torch.no_grad():
        if not isinstance(net(scale(pixels[:1])), Tensor):
            net = OneTensor(net)
        try:
            wanted = torch.cat([net(scale(some)) for some in torch.split(pixels, _BATCH)])
        except TypeError as error:
            raise ExportError(f"{path} is not written: {error}") from error
        exported = nn.Sequential(scale, net) if with_normalisation else net
        fed = pixels if with_normalisation else scale(pixels)
        program = _trace(exported.eval(), fed)
    description = describe(domain, fed.dtype, wanted)
    data, opset = (_onnx_bytes if format == "onnx" else _archive_bytes)(program, description)
    difference = _difference(format, data, fed, wanted) if check else None
    if difference is not None and not difference <= TOLERANCE:  # written so that NaN fails too
        raise ExportError(
            f"{path} is not written: exported, the network differs from PyTorch's by "
            f"{difference:.1e} where {TOLERANCE:.0e} is allowed; please report it with the output "
            "of `polymask --version --verbose`"
        )
    write_atomically(path, data)
    return Exported(str(path), format, len(data), opset, len(fed) if check else 0, difference, description)


class OneTensor(nn.Module):
    """A network that gives the one tensor of the object that it gave."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        """What the network says of images."""
        return tensor_of(self.net(images))


class Normalisation(nn.Module):
    """(p / 255 - mean) / std of pixels p, channel by channel, as `InputSpec` says."""

    scale: Tensor
    shift: Tensor

    def __init__(self, spec: InputSpec, dtype: torch.dtype) -> None:
        super().__init__()
        view = (-1,) + (1,) * (len(spec.shape) - 1)
        mean, std = torch.tensor(spec.mean), torch.tensor(spec.std)
        self.dtype = dtype
        self.register_buffer("scale", (1 / (255 * std)).to(dtype).view(view))
        self.register_buffer("shift", (mean / std).to(dtype).view(view))

    def forward(self, pixels: Tensor) -> Tensor:
        """Take uint8 (N, C, H, W) to what the network expects."""
        return pixels.to(self.dtype) * self.scale - self.shift


def describe(domain: Domain, input_type: torch.dtype, output: Tensor) -> dict[str, Any]:
    """What the user of an exported file must know: a JSON object."""
    spec = domain.input
    fed = {
        "name": "images",
        "type": str(input_type).removeprefix("torch."),
        "shape": ["batch", *spec.shape],
        "normalised": input_type.is_floating_point,
        "mean": list(spec.mean),
        "std": list(spec.std),
        "squash": spec.squash,
        "square": spec.square,
        "resize": spec.side if spec.squash else short_side(spec),
        "interpolation": spec.interpolation,
    }
    name = "features" if domain.classes is None else "standardised" if domain.target.kind == "values" else "logits"
    return {
        "format": 1,
        "polymask": __version__,
        "base": domain.base_name,
        "fingerprint": domain.fingerprint,
        "method": domain.method.name,
        "classes": domain.classes,
        "metrics": domain.metrics,
        "input": fed,
        "output": {"name": name, "shape": ["batch", *output.shape[1:]]} | domain.target.note(),
    }


def _with_norms_in(dtype: torch.dtype, net: nn.Module) -> nn.Module:
    """A copy with batch norms of the type of what they read: torch's ONNX exporter needs that."""
    net = copy.deepcopy(net)
    for module in net.modules():
        if isinstance(module, _NormBase):
            module.to(dtype)
    return net


def _check_request(path: Path, format: str, check: bool, force: bool) -> None:
    if format not in FORMATS:
        raise ExportError(f"format {format!r} is not known; use {' or '.join(FORMATS)}")
    if path.exists() and not force:
        raise ExportError(f"{path} exists; choose another file, or replace it by force")
    if not path.parent.is_dir():
        raise ExportError(f"{path} cannot be written: there is no folder {path.parent}")
    needed = ("onnx", "onnxscript", *(("onnxruntime",) if check else ()))
    missing = [name for name in needed if format == "onnx" and find_spec(name) is None]
    if missing:
        raise ExportError(f"exporting to ONNX needs {', '.join(missing)}; pip install 'polymask[export]'")


def _checked_images(images: Tensor, spec: InputSpec) -> Tensor:
    if images.dtype != torch.uint8 or tuple(images.shape[1:]) != spec.shape or not len(images):
        raise ExportError(
            f"the images to check with are {images.dtype} {tuple(images.shape)}; give uint8 "
            f"pixels of the shape (N, {', '.join(map(str, spec.shape))})"
        )
    return images.cpu()


def _made_images(spec: InputSpec) -> Tensor:
    """Four images, the same every time: two of noise, and two smooth if they have sides."""
    draw = torch.Generator().manual_seed(0)
    made = torch.rand(4, *spec.shape, generator=draw)
    if len(spec.shape) == 3:
        coarse = torch.rand(2, spec.shape[0], 5, 5, generator=draw)
        made[2:] = nn.functional.interpolate(coarse, spec.shape[1:], mode="bilinear")
    return (255 * made).round().to(torch.uint8)


def _trace(net: nn.Module, images: Tensor) -> "ExportedProgram":
    """The network as a program for batches of any size."""
    from torch.export import Dim, export

    example = images[:1].expand(2, *images.shape[1:]).contiguous()
    try:
        program = export(net, (example,), dynamic_shapes=({0: Dim("batch")},), strict=False)
    except RuntimeError as error:  # what torch's tracers raise
        raise ExportError(
            f"torch.export cannot follow the network for batches of any size: {error}; its "
            "forward must not depend on values, nor fix the number of images"
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names folders of the machine that exports
    return program


def _onnx_bytes(program: "ExportedProgram", description: dict[str, Any]) -> tuple[bytes, int]:
    size = sum(t.numel() * t.element_size() for t in program.state_dict.values())
    if size >= _ONNX_LIMIT:
        raise ExportError(
            f"the network has {size:,} bytes, and one ONNX file holds 2 GiB at most; export it for torch.export"
        )
    with warnings.catch_warnings():
        # torch's own, when it copies a program
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec", FutureWarning)
        try:
            made = torch.onnx.export(
                program,
                input_names=[description["input"]["name"]],
                output_names=[description["output"]["name"]],
                dynamo=True,
                verbose=False,
            )
        except RuntimeError as error:  # OnnxExporterError and its kinds
            raise ExportError(f"the network has no ONNX form: {error}; export it for torch.export") from error
    assert made is not None
    model = made.model
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        value.shape = type(value.shape)(["batch", *list(value.shape)[1:]])
    model.producer_name, model.producer_version = "polymask", __version__
    model.metadata_props[KEY] = json.dumps(description)
    return made.model_proto.SerializeToString(), model.opset_imports[""]


def _archive_bytes(program: "ExportedProgram", description: dict[str, Any]) -> tuple[bytes, None]:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={NOTES: json.dumps(description)})
    return file.getvalue(), None


def _difference(format: str, data: bytes, images: Tensor, wanted: Tensor) -> float:
    """The largest difference between what exported bytes and PyTorch say, over the scale."""
    run = _onnx_runner(data) if format == "onnx" else torch.export.load(io.BytesIO(data)).module()
    with torch.no_grad():
        together = torch.cat([run(some) for some in torch.split(images, _BATCH)])
        alone = run(images[-1:])
    if together.shape != wanted.shape or alone.shape != wanted[-1:].shape:
        return float("inf")
    worst = torch.cat([together - wanted, alone - wanted[-1:]]).abs().max()
    return (worst / wanted.abs().max().clamp(min=1)).item()


def _onnx_runner(data: bytes) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
