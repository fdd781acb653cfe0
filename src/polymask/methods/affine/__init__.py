"""Affine masks: the paper's method, and Piggyback as a special case."""

from polymask.methods.affine.method import PRESETS

__all__ = ["PRESETS"]
