"""Packs that say something else than what was saved, with a sha256 that is right all the same."""

import json
import struct
from pathlib import Path
from typing import Any

from safetensors import deserialize

from polymask.files import PACK_KEY
from polymask.pack.format import _sha256


def read_parts(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The manifest, the entries of the header and the bytes of all tensors."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    manifest = json.loads(header.pop("__metadata__")[PACK_KEY])
    return manifest, header, data[8 + length :]


def write_forged(path: Path, manifest: Any, header: dict[str, Any], data: bytes, *, text: str | None = None) -> None:
    """Write a pack with this manifest, or with `text` in its place, signed where that is possible."""
    if text is None:
        entries = {name: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for name, e in header.items()}
        signed = manifest | {"sha256": _sha256(manifest, entries)}
        text = json.dumps(signed)
    head = json.dumps({"__metadata__": {PACK_KEY: text}, **header}).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def tensors_of(path: Path) -> dict[str, bytes]:
    """What a pack holds, as bytes."""
    return {name: bytes(entry["data"]) for name, entry in deserialize(path.read_bytes())}
