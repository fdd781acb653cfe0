"""Optional packages, imported where they are used, with the remedy when one is missing."""

import importlib
from typing import Any

from polymask.errors import DataError
from polymask.nets.torchvision_guard import import_torchvision


def require(module: str, remedy: str) -> Any:
    """Import `module`, or say which `pip install` brings it."""
    try:
        if module.partition(".")[0] == "torchvision":
            import_torchvision()
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{module} cannot be imported ({error}); pip install {remedy}") from error


def require_vision(module: str) -> Any:
    """Import `module` of pillow or torchvision."""
    return require(module, "'polymask[vision]'")
