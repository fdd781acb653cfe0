"""Files of whole networks: state dicts that others saved, and a base's own file, which says which network it is of.

A base's file is safetensors, floating-point tensors in 32 bits. Its metadata has one key,
`polymask_base`, with a JSON object: `BaseNotes`. So a base that was trained here is loaded by its
path alone. Another program reads the file as a plain state dict.
"""

import json
import pickle
import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from polymask import __version__
from polymask.core.input import InputSpec
from polymask.core.network import digest_tensors, tensor_bytes
from polymask.errors import BaseError
from polymask.files import PACK_KEY, SUFFIX, check_fields, json_object, write_atomically

KEY = "polymask_base"
ALIGNMENT = 64  # bytes; sums over tensors that are aligned less may differ in the last bit
_TYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_TYPES |= {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}


@dataclass(frozen=True)
class BaseNotes:
    """What a base's file says about its network."""

    net: str  # as `load_base` takes it
    classes: list[str]  # of the classifier, in order
    input: dict[str, Any]
    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    library: str = __version__
    format: int = 1
    sha256: str = ""  # of the tensors

    def spec(self) -> InputSpec:
        """How to feed the network."""
        return InputSpec(**self.input)


def write_base(path: str | Path, net: nn.Module, notes: BaseNotes) -> None:
    """Write a network and its notes: the whole file or nothing."""
    check_path(path)
    state = net.state_dict()
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in state.items()}
    content = asdict(notes) | {"sha256": digest_tensors(tensors)}
    write_aligned(Path(path), tensors, {KEY: json.dumps(content, sort_keys=True, allow_nan=False)})


def write_aligned(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write safetensors, every tensor at a multiple of 64 bytes but for a few small ones at the end.

    So processes that map the file use its own pages, and share them; and sums over a weight give
    the same bits as in a process's own memory, which torch aligns in the same way.
    """
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: (sizes[name] % ALIGNMENT > 0, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        place, end = [end, end + sizes[name]], end + sizes[name]
        shape = list(tensors[name].shape)
        header[name] = {"dtype": _TYPES[tensors[name].dtype], "shape": shape, "data_offsets": place}
    head = json.dumps(header).encode()
    head += b" " * (-(8 + len(head)) % ALIGNMENT)
    data = b"".join(tensor_bytes(tensors[name]) for name in order)
    write_atomically(path, struct.pack("<Q", len(head)) + head + data)


def check_path(path: str | Path) -> None:
    """Raise unless a file of this name would be taken for a base's."""
    if Path(path).suffix != SUFFIX:
        raise BaseError(f"{path} cannot be a base's file; give it the ending {SUFFIX}")


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except OSError as error:
        raise BaseError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise BaseError(f"{path} is not an intact safetensors file: {error}") from error


def notes_in(path: Path) -> BaseNotes | None:
    """The notes of a file of weights, or None where it has none."""
    text = read_metadata(path).get(KEY) if path.suffix == SUFFIX else None
    return None if text is None else _parsed(path, text)


def read_notes(path: Path) -> BaseNotes:
    """The notes of a base's file."""
    notes = notes_in(path)
    if notes is not None:
        return notes
    if PACK_KEY in read_metadata(path):
        raise BaseError(f"{path} is the pack of a domain, not a base; give the base's own file")
    raise BaseError(
        f"{path} does not say which network it is of; give the network's name, and this file as "
        "its weights (weights=FILE, --weights FILE)"
    )


def check_tensors(path: str | Path, notes: BaseNotes, state: Mapping[str, Tensor]) -> None:
    """Raise unless the tensors are those that the notes were written with."""
    if digest_tensors(state) != notes.sha256:
        raise BaseError(f"{path} is damaged: its sha256 is not the one it was saved with; copy it again")


def _parsed(path: Path, text: str) -> BaseNotes:
    content = json_object(path, text, "note", BaseError)
    check_fields(path, content, BaseNotes, "base", BaseError)
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


def checkpoint_bytes(path: Path) -> int:
    """The size on disk of a checkpoint: a file, or a folder that transformers wrote."""
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def checkpoint_classes(path: Path) -> list[str] | None:
    """The names of a network's outputs, where a folder that transformers wrote says them."""
    config = path / "config.json"
    if not config.is_file():
        return None
    names = json_object(config, config.read_bytes(), "configuration", BaseError).get("id2label")
    if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))):
        return None
    return [str(names[str(i)]) for i in range(len(names))]


def read_checkpoint(path: Path) -> Mapping[str, Any]:
    """What a .safetensors file holds, or a .pth without code in it: no pickled object is made."""
    if not path.is_file():
        raise BaseError(f"no weights at {path}; give the path of a state dict")
    try:
        if path.suffix == SUFFIX:
            tensors = load_file(path)
            # What stays mapped to a file changes with it: only files that nobody may write are shared like that.
            shared = not path.stat().st_mode & 0o222
            return tensors if shared else {name: tensor.clone() for name, tensor in tensors.items()}
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise BaseError(f"{path} is not an intact safetensors file: {error}") from error
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"objects ({found[1]})" if found else "something else"
        raise BaseError(
            f"{path} holds {what} beside tensors, and reading those could run foreign code; save "
            "`net.state_dict()` alone, best as safetensors"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BaseError(f"{path} cannot be read as a state dict: {reason}") from error
    if not isinstance(loaded, Mapping):
        raise BaseError(f"{path} holds a {type(loaded).__name__}, not a state dict; save `net.state_dict()`")
    return loaded


def read_state(path: Path) -> dict[str, Tensor]:
    """A state dict from a safetensors file, or from a .pth that holds nothing but tensors."""
    loaded = read_checkpoint(path)
    loaded = loaded.get("state_dict", loaded)
    if not isinstance(loaded, Mapping) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise BaseError(f"{path} does not hold a state dict; save `net.state_dict()`")
    return dict(loaded)
