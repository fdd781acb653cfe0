"""The pack: a domain's file, safetensors with a JSON manifest. See docs/pack-format.md.

This module knows the file and nothing of domains or methods. Reading a manifest needs neither torch nor numpy. Every
tensor and the manifest are covered by one sha256, so a damaged pack is found before any of it is used.
"""

import hashlib
import json
import os
import re
import stat
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from polymask import __version__
from polymask.errors import FileError, PackError, PackUnavailable
from polymask.files import NAME, PACK_KEY, SUFFIX, check_fields, json_object, write_atomically
from polymask.pack.codec import CODECS, BitArray
from polymask.pack.layout import TYPES, Layout, check_codings, gather, is_shape, spread

if TYPE_CHECKING:
    import numpy as np

_HEADER_LIMIT = 8 << 20  # bytes
Stamp = tuple[int, int, int, int, int]  # device, inode, bytes, times of the last changes of content and state in ns
_INTACT: dict[Stamp, None] = {}  # files whose sha256 is known to be right, the oldest first
_REMEMBERED, _SETTLED = 1 << 16, 2 * 10**9  # stamps; ns
_LAYOUT = "layout"  # the member of a manifest of format 4 that says what is where in its streams

TARGET = "target"  # the note in `recipe` that says what a head's outputs mean, from format 2 on
SHARED = "shared"  # the note in `recipe` that names what is shared with other packs, from format 3 on
ENDING = ".shared"  # of such files
BLOCKS = "blocks"  # the note in `recipe` that says in which blocks the classes of a head came, from format 4 on
UNKNOWN = "unknown"  # the note in `recipe` that says how unknown images are told, from format 4 on


@dataclass(frozen=True)
class Manifest:
    """What a pack says about its domain.

    Format 2 is format 1 with a head that is not one of classes; `recipe` says of what. Format 3 is format 2 with
    tensors in a file beside the pack, which `recipe` names. Format 4, which is written, may be any of these, and its
    tensors lie in streams. Readers of an earlier format refuse a later one.
    """

    method: str
    options: dict[str, Any]
    base: str
    fingerprint: str
    input: dict[str, Any]
    classes: list[str] | None
    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    bits: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> shape, codec
    library: str = __version__
    format: int = 4
    sha256: str = ""

    formats: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)  # that can be read

    @property
    def tested(self) -> tuple[str, Any]:
        """What was measured on test images, by name, and the result; None where it is not told."""
        names = [f"test_{name}" for name in ("accuracy", "mean_average_precision", "mean_absolute_error")]
        name = next((name for name in names if name in self.metrics), names[0])
        return name, self.metrics.get(name)

    @property
    def target(self) -> str:
        """What the head's outputs are: classes, labels or values."""
        note = self.recipe.get(TARGET) if self.format > 1 else None
        return str(note.get("kind")) if isinstance(note, dict) else "classes"

    @property
    def unknown(self) -> Any:
        """The note on what tells unknown images, not checked; None where there is none."""
        return self.recipe.get(UNKNOWN) if self.format > 3 else None

    @property
    def beside(self) -> str | None:
        """The name of the file with what the pack shares with others; None where it stands alone."""
        needed = self.format == 3 or (self.format > 3 and SHARED in self.recipe)
        return beside_file(self.recipe.get(SHARED)) if needed else None


def beside_file(note: Any) -> str:
    """The file that a pack's note names, in its own folder; raise where the note makes no sense."""
    good = isinstance(note, dict) and note.keys() == {"file", "sha256"}
    good = good and all(isinstance(text, str) for text in note.values())
    if not good or not re.fullmatch("[0-9a-f]{64}", note["sha256"]):
        raise PackError(f"what it shares with other packs makes no sense: {str(note)[:200]}")
    if not re.fullmatch(rf"{NAME}-{note['sha256'][:16]}{re.escape(ENDING)}", note["file"]):
        raise PackError(f"what it shares with other packs makes no sense: {str(note)[:200]}")
    return str(note["file"])


@dataclass(frozen=True)
class PackInfo:
    """A pack at a glance: its manifest and the bytes of each part."""

    path: str
    bytes: int
    manifest: Manifest
    tensors: dict[str, int]  # name -> bytes in the file


def write_pack(path: str | Path, manifest: Manifest, tensors: "Mapping[str, np.ndarray[Any, Any] | BitArray]") -> None:
    """Write a pack to a temporary file beside `path`, then rename it."""
    import numpy as np
    from safetensors.numpy import save

    content = asdict(manifest)
    if manifest.format > 3:
        layout, codings, arrays = gather(tensors)
        content |= {"bits": codings, _LAYOUT: layout.to_text()}
    else:
        arrays = {
            name: np.frombuffer(t.data, np.uint8) if isinstance(t, BitArray) else np.asarray(t, order="C")
            for name, t in tensors.items()
        }
        bits = {name: t for name, t in tensors.items() if isinstance(t, BitArray)}
        content["bits"] = {name: {"shape": list(t.shape), "codec": t.codec} for name, t in bits.items()}
    try:
        # As a reader will see it: keys of notes may not be strings yet.
        content = json.loads(_canonical(content))
    except (TypeError, ValueError) as error:
        raise PackError(f"{path} cannot be written: a note in its manifest: {error}") from error
    codes = {np.dtype(t): code for code, t in TYPES.items()}
    content["sha256"] = _sha256(content, {n: (codes[a.dtype], list(a.shape), a.tobytes()) for n, a in arrays.items()})
    try:
        write_atomically(Path(path), save(arrays, {PACK_KEY: _canonical(content)}))
    except FileError as error:
        raise PackError(str(error)) from error


def read_pack(path: str | Path) -> "tuple[Manifest, dict[str, np.ndarray[Any, Any] | BitArray]]":
    """The manifest and the tensors of an intact pack; bits are left encoded."""
    import numpy as np
    from safetensors import SafetensorError, deserialize

    try:
        _check_file(Path(path))
        with Path(path).open("rb") as file:
            state = os.fstat(file.fileno())
            data = file.read()
    except OSError as error:
        raise PackUnavailable(f"{path} cannot be read: {error.strerror}") from error
    stamp = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    manifest, content, _ = _parse(path, data, len(data))
    try:
        entries = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise PackError(f"{path} is damaged: {error}; copy it again") from error
    if stamp not in _INTACT:
        if manifest.sha256 != _sha256(content, {n: (e["dtype"], e["shape"], e["data"]) for n, e in entries.items()}):
            raise PackError(f"{path} is damaged: its sha256 is not the one it was saved with; copy it again")
        _remember(stamp)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, entry in entries.items():
        if entry["dtype"] not in TYPES:
            raise PackError(f"{path}: {name} has type {entry['dtype']}, which packs do not use")
        arrays[name] = np.frombuffer(entry["data"], np.dtype(TYPES[entry["dtype"]])).reshape(entry["shape"])
    if manifest.format > 3:
        try:
            return manifest, spread(Layout.read(content[_LAYOUT]), content["bits"], arrays)
        except ValueError as error:
            raise PackError(f"{path}: its layout does not fit its tensors: {error}") from error
    tensors: dict[str, np.ndarray[Any, Any] | BitArray] = dict(arrays)
    for name, how in manifest.bits.items():
        if name not in arrays:
            raise PackError(f"{path}: the manifest names bits {name!r} that the file lacks")
        if arrays[name].dtype != np.uint8 or arrays[name].ndim != 1:
            raise PackError(f"{path}: the bits of {name!r} must be a row of bytes")
        tensors[name] = BitArray(tuple(how["shape"]), how["codec"], arrays[name].tobytes())
    return manifest, tensors


def _remember(stamp: Stamp) -> None:
    """Check the sha256 of a file once, as long as it is the same by its stamp.

    The clock of a file system ticks slowly: of a file that changed a moment ago, another version may have that stamp.
    """
    if time.time_ns() - max(stamp[-2:]) > _SETTLED:
        while len(_INTACT) >= _REMEMBERED:
            _INTACT.pop(next(iter(_INTACT)), None)
        _INTACT[stamp] = None


def inspect(path: str | Path) -> PackInfo:
    """The manifest and sizes, read from the head of the file alone (tensors are not checked)."""
    path = Path(path)
    try:
        _check_file(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            head += file.read(min(length, size, _HEADER_LIMIT))
    except OSError as error:
        raise PackUnavailable(f"{path} cannot be read: {error.strerror}") from error
    manifest, content, header = _parse(path, head, size)
    sizes, begin = {}, 8 + length  # where offsets count from
    end = begin
    for name, entry in header.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(o) is int for o in offsets)):
            raise PackError(f"{path} is damaged: {name!r} has no place in the file")
        sizes[name] = offsets[1] - offsets[0]
        end = max(end, begin + offsets[1])
    if size != end:
        raise PackError(f"{path} is damaged: it has {size:,} bytes and its header tells of {end:,}; copy it again")
    if manifest.format > 3:
        layout = Layout.read(content[_LAYOUT])
        types = {name: str(entry.get("dtype")) for name, entry in header.items() if name in layout.streams}
        if types.keys() != layout.streams.keys() or not set(types.values()) <= TYPES.keys():
            raise PackError(f"{path} is damaged: its streams are not those of its layout")
        alone = {name: size for name, size in sizes.items() if name not in layout.streams}
        sizes = alone | layout.sizes(content["bits"], types)
    return PackInfo(str(path), size, manifest, sizes)


def _check_file(path: Path) -> None:
    """Raise where there is something that is not a file: a pipe, say, would never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise PackError(f"{path} cannot be read: it is not a file")


def packs_in(folder: str | Path) -> list[Path]:
    """The packs of a library, by name; hidden files are left out."""
    if not Path(folder).is_dir():
        raise PackError(f"there is no library at {folder}; give a folder of packs")
    return sorted(path for path in Path(folder).glob(f"*{SUFFIX}") if not path.name.startswith("."))


def _parse(path: str | Path, data: bytes, size: int) -> tuple[Manifest, dict[str, Any], dict[str, Any]]:
    """The manifest (checked, and as plain JSON) and the tensor entries of a file's header."""
    if len(data) < 8:
        raise PackError(f"{path} is too short to be a pack")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(_HEADER_LIMIT, size - 8):
        raise PackError(f"{path} is not a pack: its header would be {length} bytes long")
    header = json_object(path, data[8 : 8 + length], "header", PackError)
    metadata = header.pop("__metadata__", None)
    text = metadata.get(PACK_KEY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise PackError(f"{path} is a safetensors file but not a polymask pack: it has no manifest")
    content = json_object(path, text, "manifest", PackError)
    return _manifest(path, content if content.get("format") != 4 else _flat(path, content)), content, header


def _flat(path: str | Path, content: dict[str, Any]) -> dict[str, Any]:
    """A manifest of format 4 as the earlier ones are: each mask has its shape and its codec by its name."""
    try:
        layout = Layout.read(content.get(_LAYOUT))
        codings = check_codings(layout, content.get("bits"))
    except ValueError as error:
        raise PackError(f"{path}: {_LAYOUT} and bits in the manifest make no sense: {error}") from error
    bits = {n: {"shape": list(s), "codec": c} for (n, s), (c, _) in zip(layout.masks, codings, strict=True)}
    return {name: value for name, value in content.items() if name != _LAYOUT} | {"bits": bits}


def _manifest(path: str | Path, content: dict[str, Any]) -> Manifest:
    check_fields(path, content, Manifest, "pack", PackError)

    def expect(name: str, good: bool, what: str) -> None:
        if not good:
            raise PackError(f"{path}: {name} in the manifest must be {what}")

    for name in ("method", "base", "fingerprint", "library", "sha256"):
        expect(name, isinstance(content[name], str), "a string")
    for name in ("options", "input", "recipe", "metrics", "bits"):
        expect(name, isinstance(content[name], dict), "an object")
    classes = content["classes"]
    is_names = isinstance(classes, list) and all(isinstance(c, str) for c in classes)
    expect("classes", classes is None or is_names, "a list of names, or null")
    for name, how in content["bits"].items():
        good = isinstance(how, dict) and how.keys() == {"shape", "codec"}
        good = good and how["codec"] in CODECS and is_shape(how["shape"])
        expect(f"bits of {name}", good, "a shape and a codec")
    return Manifest(**content)


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _sha256(content: Mapping[str, Any], tensors: Mapping[str, tuple[str, list[int], bytes | memoryview]]) -> str:
    """sha256 of the manifest without its own, then of each tensor in order of names.

    Each is preceded by a line that says what it is, so no two packs share a stream of bytes.
    """
    found = hashlib.sha256()
    text = _canonical({k: v for k, v in content.items() if k != "sha256"}).encode()
    found.update(b"manifest %d\n" % len(text) + text)
    for name, (dtype, shape, data) in sorted(tensors.items()):
        found.update(b"tensor %s\n" % json.dumps([name, dtype, shape]).encode())
        found.update(data)
    return found.hexdigest()
