"""A training run's state in a file: tensors in safetensors, the rest as JSON beside them.

A state is a tree of dicts and lists whose leaves are tensors, numbers, strings, booleans and None.
It is written to a temporary file, then renamed; reading it never unpickles.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from polymask.errors import PolymaskError
from polymask.pack.format import write_atomically

_KEY = "polymask-checkpoint"


class CheckpointError(PolymaskError):
    """A checkpoint is damaged, or belongs to another run."""


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a tree of tensors and JSON values: the whole file or nothing."""
    tensors: dict[str, Tensor] = {}
    skeleton = _take_out(state, tensors, "")
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(copies, {_KEY: json.dumps(skeleton)}))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The tree that was saved."""
    try:
        with safe_open(path, "pt") as file:
            skeleton = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not an intact checkpoint ({error}); delete it and start again") from error
    restored: dict[str, Any] = _put_back(skeleton, tensors)
    return restored


def _take_out(node: Any, tensors: dict[str, Tensor], place: str) -> Any:
    """The tree with every tensor replaced by {"tensor": its place}."""
    if isinstance(node, Tensor):
        tensors[place] = node
        return {"tensor": place}
    if isinstance(node, dict):
        # JSON's keys are strings; an optimiser's are numbers.
        items = [[key, _take_out(value, tensors, f"{place}/{key}")] for key, value in node.items()]
        return {"items": items}
    if isinstance(node, list | tuple):
        return [_take_out(value, tensors, f"{place}/{i}") for i, value in enumerate(node)]
    return node


def _put_back(node: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, dict) and "tensor" in node:
        return tensors[node["tensor"]]
    if isinstance(node, dict):
        return {key: _put_back(value, tensors) for key, value in node["items"]}
    if isinstance(node, list):
        return [_put_back(value, tensors) for value in node]
    return node
