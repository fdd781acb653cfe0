"""From a domain to its pack."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from polymask.core.bits import Bits
from polymask.core.registry import list_methods
from polymask.errors import PackError
from polymask.pack.format import BitArray, Manifest, write_pack

if TYPE_CHECKING:
    from polymask.core.domain import Domain


def save_domain(domain: "Domain", path: str | Path) -> None:
    """Write a domain's pack: the whole file or nothing."""
    if domain.method.name not in list_methods():
        raise PackError(
            f"{path} is not written: the method has no registered name, so no one could read "
            "it; register(name, method) and make the domain by that name"
        )
    tensors: dict[str, np.ndarray[Any, Any] | BitArray] = {}
    for name, stored in domain.stored().items():
        if isinstance(stored, Bits):
            tensors[name] = BitArray.encoded(stored.to_bytes(), stored.shape)
            continue
        if stored.dtype == torch.bfloat16 or not torch.isfinite(stored).all():
            raise PackError(
                f"{path} is not written: {name} of the domain holds values that are not "
                "finite, or bfloat16; train it again with a smaller rate, in float32"
            )
        tensors[name] = stored.cpu().numpy()
    manifest = Manifest(
        method=domain.method.name,
        options=domain.method.options(),
        base=domain.base_name,
        fingerprint=domain.fingerprint,
        input=domain.input.to_json(),
        classes=domain.classes,
        recipe=domain.recipe,
        metrics=domain.metrics,
    )
    write_pack(path, manifest, tensors)
