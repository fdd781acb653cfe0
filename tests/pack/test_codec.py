"""Masks cost what their entropy says, and damaged streams are found."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymask.pack.codec import decode_bits, encode_bits


def mask_bytes(count, density, seed=0):
    bits = np.random.default_rng(seed).random(count) < density
    return np.packbits(bits, bitorder="little").tobytes()


@settings(max_examples=200)
@given(st.integers(0, 5000), st.floats(0, 1), st.integers(0, 2**31))
def test_any_mask_round_trips_and_never_costs_more_than_raw(count, density, seed):
    data = mask_bytes(count, density, seed)
    codec, encoded = encode_bits(data)
    assert len(encoded) <= len(data)
    assert decode_bits(codec, encoded, len(data)) == data


@pytest.mark.parametrize("density", [0.5, 0.55, 0.6, 0.7, 0.8, 0.9])
def test_large_masks_cost_at_most_two_percent_more_than_their_entropy(density):
    count = 2_359_296  # the largest convolution of a ResNet-50
    _, encoded = encode_bits(mask_bytes(count, density))
    entropy = -sum(p * math.log2(p) for p in (density, 1 - density))
    assert len(encoded) * 8 / count <= 1.02 * entropy
    assert len(encoded) * 8 / count <= 1.001


@pytest.mark.parametrize(("density", "codec"), [(0.5, "raw"), (0.8, "deflate"), (0.995, "lzma")])
def test_the_codec_follows_the_density(density, codec):
    assert encode_bits(mask_bytes(1_000_000, density))[0] == codec


@pytest.mark.parametrize("density", [0.8, 0.995])
def test_damaged_or_oversized_streams_are_refused(density):
    data = mask_bytes(100_000, density)
    codec, encoded = encode_bits(data)
    for size in (len(data) - 1, len(data) + 1, 10):
        with pytest.raises(ValueError, match=r"does not|damaged"):
            decode_bits(codec, encoded, size)
    with pytest.raises(ValueError, match=r"does not|damaged"):
        decode_bits(codec, encoded[:-20], len(data))
    with pytest.raises(ValueError, match=r"does not|damaged"):
        decode_bits(codec, encoded + b"more", len(data))


def test_an_unknown_codec_is_refused():
    with pytest.raises(ValueError, match="'zstd' is not one of raw, deflate, lzma"):
        decode_bits("zstd", b"", 0)
