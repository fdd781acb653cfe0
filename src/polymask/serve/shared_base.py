"""One copy of the base for many processes: a file that each of them maps into its memory.

The system keeps a mapped file's pages once, however many processes read them. Merged networks are
each process' own; what a domain leaves as it is stays shared.
"""

from pathlib import Path

import torch
from torch import Tensor

from polymask.core.base import Base
from polymask.core.network import named_tensors
from polymask.pack.format import write_atomically


def write_base(base: Base, path: Path) -> None:
    """Write every tensor of a base to a safetensors file."""
    from safetensors.torch import save

    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in _tensors(base)}
    write_atomically(path, save(tensors))


def map_base(base: Base, path: Path) -> None:
    """Put the tensors of a file that `write_base` wrote in place of a base's own, without a copy.

    They are checked to be the same to the byte.
    """
    from safetensors.torch import load_file

    mapped = load_file(path)
    with torch.no_grad():
        for name, tensor in _tensors(base):
            tensor.data = mapped[name]
    base.verify()


def _tensors(base: Base) -> list[tuple[str, Tensor]]:
    found = [(f"net/{name}", tensor) for name, tensor in named_tensors(base.net)]
    if base.head is not None:
        found += [(f"head/{name}", tensor) for name, tensor in named_tensors(base.head)]
    return found
