"""polymask: one pretrained network, many visual domains, about one bit per weight for each.

The public names are loaded when they are first used, so that reading a pack needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polymask._version import __version__

if TYPE_CHECKING:
    from polymask.accounting import Account, account
    from polymask.base import Base, load_base
    from polymask.domain import Domain, load_domain, new_domain
    from polymask.errors import (
        BaseError,
        DataError,
        DomainError,
        InputError,
        MethodError,
        PackError,
        PolymaskError,
    )
    from polymask.input import InputSpec
    from polymask.methods import Method, Transform, create_method, list_methods, register
    from polymask.model import DomainModel, MultiDomainModel
    from polymask.pack import inspect
    from polymask.survey import Site

_HOME = {
    "accounting": ("Account", "account"),
    "base": ("Base", "load_base"),
    "domain": ("Domain", "load_domain", "new_domain"),
    "errors": (
        "BaseError",
        "DataError",
        "DomainError",
        "InputError",
        "MethodError",
        "PackError",
        "PolymaskError",
    ),
    "input": ("InputSpec",),
    "methods": ("Method", "Transform", "create_method", "list_methods", "register"),
    "model": ("DomainModel", "MultiDomainModel"),
    "pack": ("inspect",),
    "survey": ("Site",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'polymask' has no attribute {name!r}")
    value = getattr(import_module(f"polymask.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
