"""Kernels: what computes masked weights and their gradients, in plain torch or compiled.

One setting for the whole process, since it is about the machine and not about a domain: "eager",
the default, or "compiled". A run, its checkpoints and packs know nothing of it. The environment
variable `POLYMASK_KERNELS` sets it for programs that do not.
"""

import logging
import os
from functools import cache
from types import ModuleType
from typing import Literal, get_args

import torch

from polymask.errors import PolymaskError
from polymask.kernels import eager

__all__ = ["KINDS", "Kind", "kernels", "set_kernels"]

Kind = Literal["eager", "compiled"]
KINDS: tuple[str, ...] = get_args(Kind)
VARIABLE = "POLYMASK_KERNELS"
LOG = logging.getLogger("polymask")

_chosen: ModuleType | None = None


def set_kernels(kind: str) -> str:
    """Choose "eager" or "compiled" kernels; what is in use from now on.

    "compiled" is by torch.compile, which needs a C++ compiler and takes some seconds at first.
    Where it does not work, a notice says so and the kernels are eager.
    """
    global _chosen
    if kind not in KINDS:
        raise PolymaskError(f"kernels {kind!r} are not known; they are {' or '.join(KINDS)}")
    _chosen = eager
    if kind == "compiled":
        reason = _trouble()
        if reason is not None:
            LOG.warning("kernels cannot be compiled here (%s); eager ones are used", reason)
            return "eager"
        from polymask.kernels import compiled

        _chosen = compiled
    return kind


def kernels() -> ModuleType:
    """The kernels in use: `forward`, `backward` and `from_words`."""
    if torch.compiler.is_compiling():  # on the whole network: it takes plain operations in
        return eager
    if _chosen is None:
        set_kernels(os.environ.get(VARIABLE) or "eager")
    assert _chosen is not None
    return _chosen


@cache
def _trouble() -> str | None:
    """Why kernels cannot be compiled, in one line; None where they can."""
    from polymask.kernels import compiled

    W = torch.linspace(-1, 1, 1 << 16).view(1, -1)
    ks = [torch.ones(1, 1)] * 4
    try:
        compiled.forward(W, W, ks, 0.0)
    except RuntimeError as error:  # what torch.compile raises, and its compiler
        return str(error).strip().splitlines()[0]
    return None
