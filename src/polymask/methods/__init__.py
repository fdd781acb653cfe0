"""The methods: how a domain is built on a base. One file each, found by name."""

from polymask.methods import affine, baselines, bitdelta, dan, lora_conv, parallel_adapter
from polymask.methods.method import Images, Method, Objective, Part, Route, Stored, Transform
from polymask.methods.registry import create_method, list_methods, register

__all__ = [
    "Images",
    "Method",
    "Objective",
    "Part",
    "Route",
    "Stored",
    "Transform",
    "create_method",
    "list_methods",
    "register",
]

for _name, _prototype in (
    affine.PRESETS
    | baselines.PRESETS
    | bitdelta.PRESETS
    | dan.PRESETS
    | lora_conv.PRESETS
    | parallel_adapter.PRESETS
).items():
    register(_name, _prototype)
