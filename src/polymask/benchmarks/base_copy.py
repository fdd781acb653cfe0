"""A job's base as one read-only file that every node maps into memory.

The file is safetensors, with every tensor at a multiple of 64 bytes but for a few small ones at its
end. So the processes of a node use the pages of the file itself, and share them; and sums over a
weight give the same bits as over one in memory of the process, which torch aligns in the same way.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from polymask.benchmarks.jobs import BaseName
from polymask.core.network import digest, tensor_bytes
from polymask.nets.zoo import ALIGNMENT, build, read_state
from polymask.pack.format import SUFFIX, write_atomically

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def copy_base(base: BaseName, folder: Path) -> BaseName:
    """Write the base's tensors to `folder`, and say how to load it from there.

    What is loaded has the name, the input and the fingerprint of the original.
    """
    by_path = base.name.endswith(SUFFIX)
    source = Path(base.name) if by_path else base.weights
    if source is not None and source.suffix == SUFFIX:
        state, notes = read_state(source), _metadata(source)
    else:
        net, _ = build(base.name, weights=base.weights)
        state, notes = dict(net.state_dict()), {}
    file = folder.absolute() / f"base-{digest(state)[:16]}{SUFFIX}"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_aligned(file, state, notes)
        file.chmod(0o444)
    return replace(base, name=str(file)) if by_path else replace(base, weights=file)


def write_aligned(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors as safetensors: first those that leave the next one at a multiple of 64."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: (sizes[name] % ALIGNMENT > 0, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        header[name] = {
            "dtype": _TYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [end, end + sizes[name]],
        }
        end += sizes[name]
    head = json.dumps(header).encode()
    head += b" " * (-(8 + len(head)) % ALIGNMENT)
    data = b"".join(tensor_bytes(tensors[name]) for name in order)
    write_atomically(path, struct.pack("<Q", len(head)) + head + data)


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})
