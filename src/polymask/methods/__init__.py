"""The methods: how a domain is built on a base. One file each, found by name."""

from polymask.methods import (
    affine,
    ba2,
    baselines,
    bitdelta,
    covnorm,
    dan,
    ewc,
    lora_conv,
    lwf,
    mtan,
    pa_svd,
    packnet,
    parallel_adapter,
    progressive,
    series_adapter,
    series_adapter_joint,
    spottune,
)
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
    | packnet.PRESETS
    | ba2.PRESETS
    | series_adapter.PRESETS
    | series_adapter_joint.PRESETS
    | parallel_adapter.PRESETS
    | pa_svd.PRESETS
    | covnorm.PRESETS
    | dan.PRESETS
    | lora_conv.PRESETS
    | spottune.PRESETS
    | mtan.PRESETS
    | progressive.PRESETS
    | lwf.PRESETS
    | ewc.PRESETS
).items():
    register(_name, _prototype)
