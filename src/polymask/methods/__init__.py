"""The methods: how a domain is built on a base. One file each, found by name."""

from polymask.methods import affine, baselines
from polymask.methods.method import Method, Stored, Transform
from polymask.methods.registry import create_method, list_methods, register

__all__ = ["Method", "Stored", "Transform", "create_method", "list_methods", "register"]

for _name, _prototype in (affine.PRESETS | baselines.PRESETS).items():
    register(_name, _prototype)
