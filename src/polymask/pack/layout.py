"""Where the tensors of a pack lie in its streams: all masks in one tensor, all norms in one. See docs/pack-format.md.

A network has hundreds of small tensors, and a file that names each has more header than norms. So packs of format 4 put
tensors of one place and one type one after another into a stream, and one text, which packs of one method on one base
have in common, says what is where. Reading a pack is then a few operations, however many layers there are.
"""

import base64
import binascii
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from polymask.pack.codec import CODECS, BitArray

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any] | BitArray

MASKS = "masks"  # the stream of all bits
PLACES = ("transform", "norm", "route")  # whose tensors go into streams, one for each type: norm.F16
TYPES = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "U8": "u1", "I64": "<i8"}
_LARGEST = 1 << 40  # of a size in a shape
_MOST_SIZES = 32  # of a shape: what every numpy can hold
_RATIO = 100  # of a text to what it is compressed to

Shape = tuple[int, ...]
Coding = tuple[str, int]  # of one mask: codec, encoded bytes


@dataclass(frozen=True)
class Layout:
    """For every stream the names and shapes of what is in it, in order."""

    streams: Mapping[str, tuple[tuple[str, Shape], ...]]

    @cached_property
    def masks(self) -> tuple[tuple[str, Shape], ...]:
        """The masks, in order."""
        return self.streams.get(MASKS, ())

    def to_text(self) -> str:
        """As it stands in a manifest: JSON, deflated, in base 64."""
        plain = {stream: [[name, list(shape)] for name, shape in held] for stream, held in self.streams.items()}
        text = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
        packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9)
        return base64.b64encode(packer.compress(text) + packer.flush()).decode()

    @classmethod
    def read(cls, text: Any) -> "Layout":
        """The inverse of `to_text`; ValueError where a text says nothing that could be."""
        if not isinstance(text, str):
            raise ValueError("it is not a text")
        return _read(text) if len(text) < 1 << 16 else _read.__wrapped__(text)

    def sizes(self, codings: Sequence[Coding], types: Mapping[str, str]) -> dict[str, int]:
        """Bytes of every tensor, by name; `types` are those of the streams."""
        sizes = {name: size for (name, _), (_, size) in zip(self.masks, codings, strict=True)}
        for stream, held in self.streams.items():
            if stream != MASKS:
                each = int(TYPES[types[stream]][-1])
                sizes |= {name: each * math.prod(shape) for name, shape in held}
        return sizes


@lru_cache(maxsize=64)  # packs of one method on one base have one text
def _read(text: str) -> Layout:
    try:
        data = base64.b64decode(text, validate=True)
        inflater, most = zlib.decompressobj(-zlib.MAX_WBITS), _RATIO * len(data) + 1024
        plain = inflater.decompress(data, most)
        if not inflater.eof or inflater.unused_data:
            raise ValueError("its text does not end where it should")
        found = json.loads(plain)
    except (binascii.Error, zlib.error, ValueError, RecursionError) as error:
        raise ValueError(f"its text is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    streams = {stream: _held(held) for stream, held in found.items()}
    names = [name for held in streams.values() for name, _ in held]
    if len(set(names)) < len(names):
        raise ValueError("it names a tensor twice")
    return Layout(streams)


def _held(entries: Any) -> tuple[tuple[str, Shape], ...]:
    pairs = isinstance(entries, list) and entries and all(isinstance(e, list) and len(e) == 2 for e in entries)
    if not pairs or not all(_is_named_shape(name, shape) for name, shape in entries):
        raise ValueError("a stream is not a list of names and shapes")
    return tuple((name, tuple(shape)) for name, shape in entries)


def _is_named_shape(name: Any, shape: Any) -> bool:
    return isinstance(name, str) and name.isprintable() and is_shape(shape)


def is_shape(shape: Any) -> bool:
    """Whether JSON holds a tensor's shape: a few sizes, each within bounds."""
    sizes = isinstance(shape, list) and len(shape) <= _MOST_SIZES
    return sizes and all(type(n) is int and 0 <= n < _LARGEST for n in shape)


def check_codings(layout: Layout, codings: Any) -> list[Coding]:
    """How each mask is encoded; ValueError where that cannot be."""
    good = isinstance(codings, list) and len(codings) == len(layout.masks)
    for one in codings if good else ():
        good = good and isinstance(one, list) and len(one) == 2 and one[0] in CODECS
        good = good and type(one[1]) is int and 0 <= one[1] < _LARGEST
    if not good:
        raise ValueError("a codec and a number of bytes for every mask")
    return [(codec, size) for codec, size in codings]


def gather(tensors: "Mapping[str, Array]") -> "tuple[Layout, list[Coding], dict[str, np.ndarray[Any, Any]]]":
    """Tensors as a pack of format 4 has them: the layout, how masks are encoded, and the streams."""
    import numpy as np

    held: dict[str, list[tuple[str, Shape]]] = {}
    parts: dict[str, list[np.ndarray[Any, Any]]] = {}
    codings: list[Coding] = []
    alone: dict[str, np.ndarray[Any, Any]] = {}
    codes = {np.dtype(t): code for code, t in TYPES.items()}
    for name, tensor in tensors.items():
        place = name.partition("/")[0]
        if isinstance(tensor, BitArray):
            stream, data, shape = MASKS, np.frombuffer(tensor.data, np.uint8), tensor.shape
            codings.append((tensor.codec, len(tensor.data)))
        else:
            data = np.asarray(tensor, order="C")
            if place not in PLACES:
                alone[name] = data
                continue
            stream, shape = f"{place}.{codes[data.dtype]}", data.shape
        held.setdefault(stream, []).append((name, tuple(shape)))
        parts.setdefault(stream, []).append(data.reshape(-1))
    streams = {stream: np.concatenate(pieces) for stream, pieces in parts.items()}
    return Layout({stream: tuple(entries) for stream, entries in held.items()}), codings, alone | streams


def spread(
    layout: Layout, codings: Sequence[Coding], arrays: "Mapping[str, np.ndarray[Any, Any]]"
) -> "dict[str, Array]":
    """The inverse of `gather`: views of the streams, by name; ValueError where a stream is not as long as it should."""
    alone = {name: array for name, array in arrays.items() if name not in layout.streams}
    found: dict[str, Array] = {}
    for stream, held in layout.streams.items():
        data = arrays.get(stream)
        if data is None or data.ndim != 1 or (stream == MASKS and data.dtype != "u1"):
            raise ValueError(f"there is no stream {stream!r}")
        begin = 0
        for place, (name, shape) in enumerate(held):
            if stream == MASKS:
                codec, size = codings[place]
                found[name] = BitArray(shape, codec, data[begin : begin + size].tobytes())
            else:
                size = math.prod(shape)
                if begin + size > len(data):
                    break
                found[name] = data[begin : begin + size].reshape(shape)
            begin += size
        if begin != len(data) or held[-1][0] not in found:
            raise ValueError(f"the stream {stream!r} is not as long as what is in it")
    if twice := alone.keys() & found.keys():
        raise ValueError(f"{min(twice)!r} is there twice")
    return alone | found
