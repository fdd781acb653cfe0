"""polymask: one pretrained network, many visual domains, about one bit per weight for each.

The public names are loaded when they are first used, so that reading a pack needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polymask._version import __version__

if TYPE_CHECKING:
    from polymask._torchvision import import_torchvision
    from polymask.accounting import Account, account
    from polymask.base import Base, load_base
    from polymask.conversion import convert
    from polymask.data import DomainData, load_data
    from polymask.domain import Domain, new_domain
    from polymask.engines import run_jobs
    from polymask.errors import (
        BaseError,
        BenchmarkError,
        DataError,
        DomainError,
        EngineError,
        ExportError,
        HubError,
        InputError,
        InterruptedTraining,
        MethodError,
        PackError,
        PolymaskError,
        TrainingError,
    )
    from polymask.exporting import Exported, export_domain
    from polymask.input import InputSpec
    from polymask.kernels import set_kernels
    from polymask.learning import Loaders, learn, make_loaders
    from polymask.loading import load_domain
    from polymask.methods import Method, Transform, create_method, list_methods, register
    from polymask.model import DomainModel, MultiDomainModel
    from polymask.pack import inspect
    from polymask.predict import evaluate
    from polymask.pretraining import pretrain
    from polymask.recipes import Recipe, get_recipe
    from polymask.sequence import Fitted, Lesson, fit_all
    from polymask.survey import Site
    from polymask.train import fit

_HOME = {
    "_torchvision": ("import_torchvision",),
    "accounting": ("Account", "account"),
    "base": ("Base", "load_base"),
    "conversion": ("convert",),
    "data": ("DomainData", "load_data"),
    "domain": ("Domain", "new_domain"),
    "engines": ("run_jobs",),
    "errors": (
        "BaseError",
        "BenchmarkError",
        "DataError",
        "DomainError",
        "EngineError",
        "ExportError",
        "HubError",
        "InputError",
        "InterruptedTraining",
        "MethodError",
        "PackError",
        "PolymaskError",
        "TrainingError",
    ),
    "exporting": ("Exported", "export_domain"),
    "sequence": ("Fitted", "Lesson", "fit_all"),
    "input": ("InputSpec",),
    "kernels": ("set_kernels",),
    "learning": ("Loaders", "learn", "make_loaders"),
    "loading": ("load_domain",),
    "methods": ("Method", "Transform", "create_method", "list_methods", "register"),
    "model": ("DomainModel", "MultiDomainModel"),
    "pack": ("inspect",),
    "predict": ("evaluate",),
    "pretraining": ("pretrain",),
    "recipes": ("Recipe", "get_recipe"),
    "survey": ("Site",),
    "train": ("fit",),
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
