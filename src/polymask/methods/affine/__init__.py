"""Affine masks: the paper's method, and Piggyback as a special case."""

from polymask.methods.affine.coarse import PRESETS as COARSE
from polymask.methods.affine.cross import PRESETS as CROSS
from polymask.methods.affine.method import PRESETS as PLAIN

PRESETS = {**PLAIN, **CROSS, **COARSE}

__all__ = ["PRESETS"]
