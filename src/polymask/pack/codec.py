"""How bits become bytes: raw, Huffman-coded or by LZMA, whichever is smallest. See docs/pack-format.md.

Raw costs one bit an element, so nothing ever costs more. A mask of independent bits has no repetitions to find: Huffman
codes over its bytes come within 2 % of the entropy where ones and zeros are up to nine to one, and LZMA's adaptive
coder is better where they are more uneven.

Bytes with equally many ones are about equally likely, so their Huffman codes are equally long. Numbering the bytes by
that count before they are coded puts equal code lengths side by side, where deflate's tables, one per 32 KiB, cost
least.
"""

import lzma
import math
import zlib
from dataclasses import dataclass
from typing import Any

CODECS = ("raw", "deflate", "lzma")
_MEMORY = 16 << 20  # what a decoder may use besides its output
_BY_ONES = bytes(sorted(range(256), key=lambda byte: (f"{byte:b}".count("1"), byte)))
_RANK = bytes(_BY_ONES.index(byte) for byte in range(256))
_FILTERS = [{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 16, "lc": 0, "lp": 0, "pb": 0}]


def encode_bits(data: bytes) -> tuple[str, bytes]:
    """(codec, encoded data), the shortest."""
    encoded = [("raw", data), ("deflate", _deflate(data, zlib.Z_HUFFMAN_ONLY))]
    if len(encoded[1][1]) < len(data) // 4:  # so uneven that there are repetitions after all
        encoded.append(("deflate", _deflate(data, zlib.Z_DEFAULT_STRATEGY)))
        encoded.append(("lzma", lzma.compress(data, lzma.FORMAT_ALONE, filters=_FILTERS)))
    return min(encoded, key=lambda pair: len(pair[1]))


def decode_bits(codec: str, data: bytes, size: int) -> bytes:
    """The `size` bytes that were encoded; ValueError if there are more, fewer or none."""
    if codec not in CODECS:
        raise ValueError(f"codec {codec!r} is not one of {', '.join(CODECS)}")
    decoded = data
    if codec != "raw":
        stream: Any = lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=_MEMORY)
        if codec == "deflate":
            stream = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            decoded = stream.decompress(data, size + 1)
        except (zlib.error, lzma.LZMAError, EOFError) as error:
            raise ValueError(f"the {codec} stream is damaged: {error}") from error
        if not stream.eof or stream.unused_data:
            raise ValueError(f"the {codec} stream does not end where it should")
    if len(decoded) != size:
        raise ValueError(f"the {codec} data does not decode to {size} bytes")
    return decoded.translate(_BY_ONES) if codec == "deflate" else decoded


def _deflate(data: bytes, strategy: int) -> bytes:
    stream = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, strategy)
    return stream.compress(data.translate(_RANK)) + stream.flush()


@dataclass(frozen=True)
class BitArray:
    """Bits of some shape, as they stand in a pack: encoded."""

    shape: tuple[int, ...]
    codec: str
    data: bytes

    def decoded(self) -> bytes:
        """ceil(elements / 8) bytes. Check the shape first: this allocates what it asks for."""
        return decode_bits(self.codec, self.data, -(-math.prod(self.shape) // 8))

    @classmethod
    def encoded(cls, data: bytes, shape: tuple[int, ...]) -> "BitArray":
        """From plain bytes, by the codec that makes them shortest."""
        return cls(shape, *encode_bits(data))
