"""What a network returns, and where its features are in it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_ONE_TENSOR = ("logits", "pooler_output")  # of a transformers ModelOutput


def features_of(output: Any) -> Any:
    """What a network's output is to a domain.

    A tensor is itself; of a transformers ModelOutput it is the logits, or the pooled features. A
    dict, list or tuple of tensors is taken for feature maps, which take no linear head.
    """
    if isinstance(output, Mapping):
        output = next((output[key] for key in _ONE_TENSOR if key in output), output)
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, Mapping) else output
    if not isinstance(output, Mapping | list | tuple) or not parts:
        raise _not_features(output)
    if not all(isinstance(part, Tensor) for part in parts):
        raise _not_features(output)
    return output


def tensor_of(output: Any) -> Tensor:
    """The one tensor in a network's output, found as `features_of` finds it."""
    features = features_of(output)
    if not isinstance(features, Tensor):
        raise _not_features(output)
    return features


def _not_features(output: Any) -> TypeError:
    return TypeError(
        f"the network returns {type(output).__name__}, not a tensor of features; wrap it in a module that returns one"
    )
