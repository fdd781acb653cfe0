"""Kernels: what computes masked weights and their gradients, in plain torch or compiled.

One setting for the whole process, since it is about the machine and not about a domain: "eager",
the default, or "compiled". A run, its checkpoints and packs know nothing of it. The environment
variable `POLYMASK_KERNELS` sets it for programs that do not, and for the processes they start.
"""

import logging
import os
from functools import cache
from typing import Literal, get_args

import torch

from polymask.errors import PolymaskError

__all__ = ["KINDS", "Kind", "compiled_kernels", "set_kernels"]

Kind = Literal["eager", "compiled"]
KINDS: tuple[str, ...] = get_args(Kind)
VARIABLE = "POLYMASK_KERNELS"
LOG = logging.getLogger("polymask")

_chosen: str | None = None


def set_kernels(kind: str) -> str:
    """Choose "eager" or "compiled" kernels; what is in use from now on.

    "compiled" is by torch.compile, which needs a C++ compiler and takes some seconds at first.
    Where it does not work, a notice says so and the kernels are eager. Weights are the same to the
    bit; gradients of compiled kernels differ in rounding. The base's weights are moved into one
    buffer when they are first used, so a network that shared its memory with it no longer does.
    """
    global _chosen
    if kind not in KINDS:
        raise PolymaskError(f"kernels {kind!r} are not known; they are {' or '.join(KINDS)}")
    if kind == "compiled" and (reason := _trouble()) is not None:
        LOG.warning("kernels cannot be compiled here (%s); eager ones are used", reason)
        kind = "eager"
    _chosen = kind
    return kind


def compiled_kernels() -> bool:
    """Whether compiled kernels are in use."""
    if torch.compiler.is_compiling():  # on the whole network: it takes plain operations in
        return False
    if _chosen is None:
        set_kernels(os.environ.get(VARIABLE) or "eager")
    return _chosen == "compiled"


@cache
def _trouble() -> str | None:
    """Why kernels cannot be compiled, in one line; None where they can."""
    from polymask.methods.affine.compiled import forward_all

    W, R, K, out = (
        torch.ones(64, 1024),
        torch.ones(64, 1024),
        torch.ones(2, 4),
        torch.ones(64, 1024),
    )
    try:
        forward_all(W, R, K, torch.arange(64) // 32, 0.0, out)
    except (RuntimeError, OSError) as error:  # of torch.compile, its compiler and its files
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return None
