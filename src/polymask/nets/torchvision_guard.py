"""Import torchvision beside a CPU-only torch, whatever build of it pip chose.

The torchvision wheel that pip finds on Linux is a CUDA build. Beside a CPU-only torch its compiled
ops do not load, and `import torchvision` stops at two fake kernels for ops that nobody declared.
Declaring those two is enough: models, transforms and datasets need none of the compiled ops.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_lock = threading.Lock()
_declared: list[torch.library.Library] = []  # ops vanish with the library object that made them


def import_torchvision() -> ModuleType:
    """Import torchvision; call it before anything that imports torchvision itself, such as timm."""
    with _lock:
        if "torchvision" not in sys.modules:
            _make_importable()
        # It computes with tensors on import, which a caller's meta device would not let it.
        with torch.device("cpu"):
            return importlib.import_module("torchvision")


def _make_importable() -> None:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ImportError(
            "torchvision is not installed; install it with: pip install 'polymask[vision]'", name="torchvision"
        )
    cpu_only = torch.version.cuda is None and torch.version.hip is None
    if cpu_only and not _declared and not _compiled_ops_load(Path(spec.origin).parent):
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            library.define(name + _SCHEMA)  # type: ignore[no-untyped-call]
        _declared.append(library)


def _compiled_ops_load(folder: Path) -> bool:
    """Whether torchvision's own ops work here; loading them twice is harmless."""
    extension = importlib.machinery.PathFinder.find_spec("_C", [str(folder)])
    if extension is None or extension.origin is None:
        return False
    try:
        torch.ops.load_library(extension.origin)  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return True
