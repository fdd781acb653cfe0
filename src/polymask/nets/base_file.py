"""A base's file: the tensors of a whole network, and a note that says which network they are of.

The file is safetensors, floating-point tensors in 32 bits. Its metadata has one key,
`polymask_base`, with a JSON object: `BaseNotes`. So a base that was trained here is loaded by its
path alone. Another program reads the file as a plain state dict.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from polymask import __version__
from polymask.core.input import InputSpec
from polymask.core.network import digest
from polymask.errors import BaseError
from polymask.files import PACK_KEY, SUFFIX, write_atomically

FORMAT = 1
KEY = "polymask_base"


@dataclass(frozen=True)
class BaseNotes:
    """What a base's file says about its network."""

    net: str  # as `load_base` takes it
    classes: list[str]  # of the classifier, in order
    input: dict[str, Any]
    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    library: str = __version__
    format: int = FORMAT
    sha256: str = ""  # of the tensors

    def spec(self) -> InputSpec:
        """How to feed the network."""
        return InputSpec(**self.input)


def write_base(path: str | Path, net: nn.Module, notes: BaseNotes) -> None:
    """Write a network and its notes: the whole file or nothing."""
    check_path(path)
    tensors = {name: _stored(tensor) for name, tensor in net.state_dict().items()}
    content = asdict(notes) | {"sha256": digest(tensors)}
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    write_atomically(Path(path), save(tensors, {KEY: text}))


def check_path(path: str | Path) -> None:
    """Raise unless a file of this name would be taken for a base's."""
    if Path(path).suffix != SUFFIX:
        raise BaseError(f"{path} cannot be a base's file; give it the ending {SUFFIX}")


def notes_in(path: Path) -> BaseNotes | None:
    """The notes of a file of weights, or None where it has none."""
    if path.suffix != SUFFIX:
        return None
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(KEY)
    except OSError as error:
        raise BaseError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise BaseError(f"{path} is not an intact safetensors file: {error}") from error
    return None if text is None else _parsed(path, text)


def read_notes(path: Path) -> BaseNotes:
    """The notes of a base's file."""
    notes = notes_in(path)
    if notes is not None:
        return notes
    with safe_open(path, "pt") as file:
        is_pack = PACK_KEY in (file.metadata() or {})
    if is_pack:
        raise BaseError(f"{path} is the pack of a domain, not a base; give the base's own file")
    raise BaseError(
        f"{path} does not say which network it is of; give the network's name, and this file as "
        "its weights (weights=FILE, --weights FILE)"
    )


def check_tensors(path: str | Path, notes: BaseNotes, state: Mapping[str, Tensor]) -> None:
    """Raise unless the tensors are those that the notes were written with."""
    if digest(state) != notes.sha256:
        raise BaseError(f"{path} is damaged: its sha256 is not the one it was saved with; copy it anew")


def _stored(tensor: Tensor) -> Tensor:
    # A copy each, in row-major order: tied tensors must not share memory in safetensors.
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    copy = torch.empty(tensor.shape, dtype=dtype)
    return copy.copy_(tensor.detach())


def _parsed(path: Path, text: str) -> BaseNotes:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise BaseError(f"{path} is damaged: its notes are not JSON ({error})") from error
    if not isinstance(content, dict):
        raise BaseError(f"{path} is damaged: its notes are no JSON object")
    if content.get("format") != FORMAT:
        raise BaseError(
            f"{path} has base format {content.get('format')!r}, polymask {__version__} reads "
            f"format {FORMAT}; use the version that wrote it ({content.get('library')!r})"
        )
    expected = {f.name for f in fields(BaseNotes)}
    if content.keys() != expected:
        odd = sorted(content.keys() ^ expected)
        raise BaseError(f"{path}: its notes lack or do not know {', '.join(map(repr, odd))}")
    kinds: dict[str, type] = {"net": str, "sha256": str, "library": str, "classes": list}
    kinds |= {"input": dict, "recipe": dict, "metrics": dict}
    for name, kind in kinds.items():
        if not isinstance(content[name], kind):
            raise BaseError(f"{path}: {name} in its notes must be a {kind.__name__}")
    if not content["classes"] or not all(isinstance(name, str) for name in content["classes"]):
        raise BaseError(f"{path}: classes in its notes must be names")
    notes = BaseNotes(**content)
    try:
        notes.spec()
    except (TypeError, BaseError) as error:
        raise BaseError(f"{path}: input in its notes: {error}") from error
    return notes
