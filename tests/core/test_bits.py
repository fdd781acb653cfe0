"""Bits round-trip for any shape."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polymask.core.bits import Bits, pack, unpack

shapes = st.lists(st.integers(0, 9), min_size=0, max_size=4)


@given(shapes, st.floats(0, 1), st.integers(0, 2**31))
def test_packing_and_unpacking_gives_the_mask_back(shape, density, seed):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    bits = Bits.of(mask)
    assert bits.words.dtype == torch.int32
    assert bits.words.numel() == -(-mask.numel() // 32)
    assert torch.equal(bits.unpack(), mask)


@given(shapes, st.integers(0, 2**31))
def test_bytes_are_numpys_little_endian_bits(shape, seed):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    data = Bits.of(mask).to_bytes()
    assert data == np.packbits(mask.numpy().reshape(-1), bitorder="little").tobytes()
    assert torch.equal(Bits.from_bytes(data, tuple(shape)).unpack(), mask)


def test_bits_beyond_the_last_element_are_refused():
    with pytest.raises(ValueError, match="beyond the last of 3 elements"):
        Bits.from_bytes(b"\x0f", (3,))


def test_a_wrong_number_of_bytes_is_refused():
    with pytest.raises(ValueError, match="2 bytes cannot be the bits of shape"):
        Bits.from_bytes(b"\x01\x01", (8,))


def test_shapes_alone_can_be_packed():
    bits = Bits.of(torch.empty(7, 9, dtype=torch.bool, device="meta"))
    assert bits.shape == (7, 9)
    assert bits.words.shape == (2,)


def test_a_strided_mask_is_packed_in_row_major_order():
    mask = torch.rand(6, 5, 4, 3) < 0.5
    last = mask.to(memory_format=torch.channels_last)
    assert torch.equal(pack(last), pack(mask))
    assert torch.equal(unpack(pack(last), mask.numel()).reshape(mask.shape), mask)


def test_a_mask_without_memory_is_packed_without_memory():
    packed = Bits.of(torch.empty(5, 7, dtype=torch.bool, device="meta"))
    assert packed.words.is_meta
    assert (packed.words.shape, packed.words.dtype) == ((2,), torch.int32)
