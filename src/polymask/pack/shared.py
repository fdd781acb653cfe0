"""What domains share and no pack holds: a file beside the packs, named by what is in it.

A pack that needs one says so in its manifest, by the file's name and sha256. The file is looked for in the pack's own
folder, checked once, and kept in memory once for all packs that need it. It never changes: another content has another
name. See docs/pack-format.md.
"""

import hashlib
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymask.core.network import digest_tensors
from polymask.errors import FileError, PackError, PackUnavailable
from polymask.files import write_atomically
from polymask.pack.format import ENDING, beside_file

_KEY = "polymask-shared"  # of the metadata of safetensors: the base's fingerprint
_IN_MEMORY: "dict[str, dict[str, weakref.ref[Tensor]]]" = {}  # by sha256: what some domain holds


def write_shared(folder: Path, method: str, tensors: Mapping[str, Tensor], fingerprint: str) -> dict[str, str]:
    """Write what packs of a folder share, unless it is there; the note for their manifests."""
    from safetensors.torch import save

    digest = _digest(tensors, fingerprint)
    note = {"file": f"{method}-{digest[:16]}{ENDING}", "sha256": digest}
    path = folder / note["file"]
    if path.exists():
        read_shared(folder, note, fingerprint)  # raises where it is another's, or damaged
        return note
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        write_atomically(path, save(plain, {_KEY: fingerprint}))
    except FileError as error:
        raise PackError(str(error)) from error
    return note


def read_shared(folder: Path, note: Any, fingerprint: str) -> Mapping[str, Tensor]:
    """The tensors that a pack's note names, checked; the same tensors for all packs that need them."""
    path, digest = folder / beside_file(note), note["sha256"]
    known = {name: there for name, tensor in _IN_MEMORY.get(digest, {}).items() if (there := tensor()) is not None}
    if known and len(known) == len(_IN_MEMORY[digest]) and path.is_file():
        return known
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = path.read_bytes()
    except OSError as error:
        raise PackUnavailable(
            f"{path} is missing, and the pack needs it ({error.strerror}): copy it beside the pack from where the pack "
            "came from"
        ) from error
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise PackError(f"{path} is damaged: {error}; copy it again") from error
    if not all(t.dtype in (torch.float32, torch.float64) and torch.isfinite(t).all() for t in tensors.values()):
        raise PackError(f"{path} holds values that are not finite floats; copy it again")
    if _digest(tensors, fingerprint) != digest:
        raise PackError(f"{path} is not what the pack was saved with, or is for another base; copy it again")
    _IN_MEMORY[digest] = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
    return tensors


def _digest(tensors: Mapping[str, Tensor], fingerprint: str) -> str:
    """sha256 of the base's fingerprint and of the tensors' digest."""
    return hashlib.sha256(f"{fingerprint}\n{digest_tensors(tensors)}\n".encode()).hexdigest()
