"""Affine masks: the paper's method, and Piggyback as a special case."""

from polymask.methods.affine.cross import PRESETS as CROSS
from polymask.methods.affine.method import PRESETS as PLAIN

PRESETS = {**PLAIN, **CROSS}

__all__ = ["PRESETS"]
