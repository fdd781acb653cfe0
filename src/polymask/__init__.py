"""polymask: one pretrained network, many visual domains, about one bit per weight for each.

The public names are loaded when they are first used, so that reading a pack needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from polymask.benchmarks.local import run_jobs
    from polymask.conversion.convert import convert
    from polymask.conversion.export import Exported, export_domain
    from polymask.core.accounting import Account, account
    from polymask.core.base import Base
    from polymask.core.domain import Domain
    from polymask.core.input import InputSpec
    from polymask.core.method import Method
    from polymask.core.parts import Transform
    from polymask.core.registry import create_method, list_methods, new_domain, register
    from polymask.core.survey import Site
    from polymask.data.images import DomainData
    from polymask.data.load import load_data
    from polymask.errors import (
        BaseError,
        BenchmarkError,
        DataError,
        DomainError,
        EngineError,
        ExportError,
        FileError,
        HubError,
        InputError,
        InterruptedTraining,
        MethodError,
        PackError,
        PolymaskError,
        TrainingError,
    )
    from polymask.library.model import DomainModel, MultiDomainModel
    from polymask.library.versions import rollback
    from polymask.lifelong.cross import bake
    from polymask.lifelong.extend import Extended, extend
    from polymask.methods.affine.formula import set_kernels
    from polymask.nets.zoo import import_torchvision, load_base
    from polymask.pack.format import inspect
    from polymask.pack.storing import load_domain
    from polymask.report.card import push
    from polymask.train.evaluation import Evaluation
    from polymask.train.fit import fit
    from polymask.train.fit_all import Fitted, Lesson, fit_all
    from polymask.train.learn import Loaders, learn, make_loaders
    from polymask.train.predict import Prediction, evaluate, evaluate_in_detail
    from polymask.train.pretrain import pretrain
    from polymask.train.recipe import Recipe, get_recipe
    from polymask.train.unknown import Calibration, calibrate

_HOME = {
    "benchmarks.local": "run_jobs",
    "conversion.convert": "convert",
    "conversion.export": "export_domain Exported",
    "core.accounting": "Account account",
    "core.base": "Base",
    "core.domain": "Domain",
    "core.input": "InputSpec",
    "core.method": "Method",
    "core.parts": "Transform",
    "core.registry": "create_method list_methods new_domain register",
    "core.survey": "Site",
    "data.images": "DomainData",
    "data.load": "load_data",
    "errors": "BaseError BenchmarkError DataError DomainError EngineError ExportError FileError HubError "
    "InputError InterruptedTraining MethodError PackError PolymaskError TrainingError",
    "library.model": "DomainModel MultiDomainModel",
    "library.versions": "rollback",
    "lifelong.cross": "bake",
    "lifelong.extend": "extend Extended",
    "methods.affine.formula": "set_kernels",
    "nets.zoo": "import_torchvision load_base",
    "pack.format": "inspect",
    "pack.storing": "load_domain",
    "report.card": "push",
    "train.fit": "fit",
    "train.fit_all": "fit_all Fitted Lesson",
    "train.learn": "learn Loaders make_loaders",
    "train.pretrain": "pretrain",
    "train.evaluation": "Evaluation",
    "train.predict": "evaluate evaluate_in_detail Prediction",
    "train.recipe": "get_recipe Recipe",
    "train.unknown": "calibrate Calibration",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'polymask' has no attribute {name!r}")
    value = getattr(import_module(f"polymask.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
