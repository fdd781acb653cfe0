"""Packs: exact round trips, and nothing but errors from damaged or hostile files."""

import contextlib
import dataclasses
import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polymask as pm
from nets import SPEC, logits, tiny_base, tiny_net, trained
from polymask.core.bits import Bits
from polymask.methods.affine.method import Affine
from polymask.pack.codec import BitArray
from polymask.pack.format import Manifest, inspect, read_pack, write_pack


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def domain(base):
    domain = trained(base, scores=(-1.0, 1.0))
    domain.metrics = {"test_accuracy": 12.5}
    domain.recipe = {"name": "quick", "epochs": 3}
    return domain


@pytest.fixture(scope="module")
def pack(domain, tmp_path_factory):
    path = tmp_path_factory.mktemp("packs") / "d.safetensors"
    domain.save(path)
    return path


def same(a: pm.Domain, b: pm.Domain) -> bool:
    """Everything that a pack keeps is equal to the bit."""
    x, y = a.stored(), b.stored()
    return (
        (a.classes, a.method, a.metrics, a.recipe, a.input, a.base_name, a.fingerprint)
        == (b.classes, b.method, b.metrics, b.recipe, b.input, b.base_name, b.fingerprint)
        and x.keys() == y.keys()
        and all(_equal(x[name], y[name]) for name in x)
    )


def _equal(a, b) -> bool:
    if isinstance(a, Bits) != isinstance(b, Bits):
        return False
    if isinstance(a, Bits):
        return a.shape == b.shape and torch.equal(a.words, b.words)
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def test_a_pack_gives_everything_back(base, domain, pack):
    assert same(pm.load_domain(pack, base), domain)


def test_equal_domains_give_equal_files_and_no_time_enters_them(base, domain, pack, tmp_path):
    domain.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == pack.read_bytes()


def test_other_libraries_can_open_a_pack(pack):
    from safetensors import safe_open

    with safe_open(pack, "numpy") as file:
        assert json.loads(file.metadata()["polymask"])["method"] == "affine-full"
        assert set(file.keys()) == {"masks", "transform.F32", "norm.F32", "head/weight", "head/bias"}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.floats(0, 1),
    st.integers(0, 2**31),
    st.lists(st.text(min_size=1), max_size=4, unique=True),
)
def test_any_shape_density_and_class_names_round_trip(tmp_path, shape, density, seed, classes):
    mask = np.random.default_rng(seed).random(shape) < density
    data = np.packbits(mask.reshape(-1), bitorder="little").tobytes()
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    manifest = Manifest("m", {}, "b", "f", {}, classes)
    path = tmp_path / "p.safetensors"
    write_pack(path, manifest, {"m": BitArray.encoded(data, tuple(shape)), "v": values})
    again, tensors = read_pack(path)
    assert again.classes == classes
    assert tensors["m"].decoded() == data
    assert tensors["m"].shape == tuple(shape)
    assert tensors["v"].tobytes() == values.tobytes()


def corruptions(data: bytes, count: int):
    """`count` damaged versions of a file, of every kind."""
    rng = random.Random(0)
    (header,) = struct.unpack_from("<Q", data)
    body = 8 + header
    for i in range(count):
        kind = i % 8
        damaged = bytearray(data)
        if kind == 0:  # one bit, anywhere
            damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:  # one bit of the header
            damaged[rng.randrange(body)] ^= 1 << rng.randrange(8)
        elif kind == 2:  # cut short
            del damaged[rng.randrange(len(data)) :]
        elif kind == 3:  # something appended
            damaged += rng.randbytes(rng.randrange(1, 64))
        elif kind == 4:  # two stretches of the tensors swapped
            n = rng.randrange(1, 16)
            a, b = (rng.randrange(body, len(data) - n) for _ in range(2))
            damaged[a : a + n], damaged[b : b + n] = damaged[b : b + n], damaged[a : a + n]
        elif kind == 5:  # a stretch overwritten
            n, a = rng.randrange(1, 64), rng.randrange(len(data) - 64)
            damaged[a : a + n] = rng.randbytes(n)
        elif kind == 6:  # a digit of the header changed: a shape, an offset, a number
            digits = [j for j in range(8, body) if chr(data[j]).isdigit()]
            damaged[rng.choice(digits)] = ord(str(rng.randrange(10)))
        else:  # a declared header length
            damaged[:8] = struct.pack("<Q", rng.choice([0, 1, header + 1, 2**32, 2**63, 2**64 - 1]))
        yield bytes(damaged)


def test_corruptions_of_every_kind_raise_or_give_exactly_what_was_saved(base, domain, pack, tmp_path):
    data = pack.read_bytes()
    path = tmp_path / "damaged.safetensors"
    raised = 0
    for damaged in corruptions(data, 800):
        path.write_bytes(damaged)
        loaded = None
        with contextlib.suppress(pm.PackError):
            loaded = pm.load_domain(path, base)
        raised += loaded is None
        assert loaded is None or same(loaded, domain)
    assert raised > 680  # some damage is none: a digit replaced by itself, equal stretches swapped


def altered(pack, path, *, manifest=(), tensors=()):
    """A pack whose sha256 is right but whose content is not what the domain expects."""
    old, arrays = read_pack(pack)
    arrays = dict(arrays) | dict(tensors)
    arrays = {name: array for name, array in arrays.items() if array is not None}
    write_pack(path, dataclasses.replace(old, **dict(manifest)), arrays)


MASK = "transform/stem.weight/mask"
HOSTILE = {
    "another base": ({"fingerprint": "0" * 64}, {}, "was made for base tiny"),
    "unknown method": ({"method": "afine"}, {}, "'afine' is not known; did you mean affine"),
    "unknown option": ({"options": {"k9": 1}}, {}, "no option 'k9'"),
    "senseless option": ({"options": {"k1": []}}, {}, "k1=\\[\\] must be a number"),
    "bad input": ({"input": {"shape": []}}, {}, "input shape"),
    "unknown input": ({"input": {"sides": 3}}, {}, "sides"),
    "input of other channels": ({"input": {"shape": [1, 16, 16], "mean": [0], "std": [1]}}, {}, "tiny takes 3 × 16"),
    "input of more dimensions": ({"input": {"shape": [3, 4, 16, 16]}}, {}, "its images are 3 × 4 × 16 × 16, and tiny"),
    "endless images": ({"input": {"shape": [3, 1 << 30, 1 << 30]}}, {}, "resized to more than 4,096 pixels"),
    "a wide image": ({"input": {"shape": [3, 16, 4097], "crop": 1}}, {}, "resized to more than 4,096 pixels"),
    "an endless margin": ({"input": {"shape": [3, 16, 16], "crop": 1e-300}}, {}, "resized to more than 4,096 pixels"),
    "a mask of very many sizes": ({}, {MASK: BitArray((1,) * 33, "raw", b"0")}, "bits in the manifest make no sense"),
    "too few classes": ({"classes": ["one"]}, {}, "head/weight has shape"),
    "no classes": ({"classes": []}, {}, "classes must be a list"),
    "repeated class": ({"classes": ["a", "a", "b"]}, {}, "class names must be distinct"),
    "input of words": ({"input": {"shape": ["x", 1, 1]}}, {}, "input shape must be a list"),
    "scores of words": ({"options": {"scores": ["x", "y"]}}, {}, "scores=.* must be a range"),
    "a word as threshold": ({"options": {"threshold": "x"}}, {}, "threshold='x' must be"),
    "a missing tensor": ({}, {"head/bias": None}, "lacks or does not know head/bias"),
    "a foreign tensor": ({}, {"x": np.zeros(3, np.float32)}, "lacks or does not know x"),
    "not a number": ({}, {"head/bias": np.full(3, np.nan, np.float32)}, "not finite"),
    "infinite": ({}, {"head/bias": np.full(3, np.inf, np.float32)}, "not finite"),
    "another type": ({}, {"head/bias": np.zeros(3, np.float64)}, "has type float64, not"),
    "another shape": ({}, {"head/bias": np.zeros(4, np.float32)}, "has shape \\(4,\\), not"),
    "floats for bits": ({}, {MASK: np.zeros((8, 3, 3, 3), np.float32)}, "must be|has shape|bits"),
    "a transposed mask": ({}, {MASK: BitArray((3, 8, 3, 3), "raw", bytes(27))}, "has shape"),
    "a huge mask": ({}, {MASK: BitArray((1 << 39,), "raw", b"")}, "has shape"),
    "a short mask": ({}, {MASK: BitArray((8, 3, 3, 3), "raw", bytes(26))}, "does not decode to 27"),
    "surplus bits": ({}, {MASK: BitArray((8, 3, 3, 3), "lzma", b"")}, "damaged|does not end"),
    "a bomb": ({}, {MASK: BitArray.encoded(bytes(1 << 26), (8, 3, 3, 3))}, "does not"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_well_formed_pack_with_wrong_content_is_refused(base, pack, tmp_path, case):
    manifest, tensors, message = HOSTILE[case]
    path = tmp_path / "hostile.safetensors"
    altered(pack, path, manifest=manifest, tensors=tensors)
    with pytest.raises(pm.PackError, match=message) as caught:
        pm.load_domain(path, base)
    assert str(path) in str(caught.value)


def raw_file(path, header: bytes, body: bytes = b"", length: int | None = None):
    size = len(header) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + header + body)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"{" * 50_000,
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b'{"__metadata__":{"polymask":"{}"}}',
        b'{"__metadata__":{"polymask":"[]"}}',
        b'{"__metadata__":{"polymask":"{\\"format\\":1}"}}',
        b'{"__metadata__":{"polymask":"{\\"format\\":NaN}"}}',
        b'{"__metadata__":{"polymask":"{\\"format\\":99,\\"library\\":\\"9.0\\"}"}}',
        b'{"__metadata__":{"polymask":' + b"9" * 5000 + b"}}",
        b'{"__metadata__":{"polymask":"\xff\xfe"}}',
        b'{"__metadata__":[1]}',
        b'{"x":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}',
    ],
)
def test_hostile_headers_are_refused_by_both_readers(tmp_path, base, header):
    path = tmp_path / "hostile.safetensors"
    raw_file(path, header)
    with pytest.raises(pm.PackError):
        pm.load_domain(path, base)
    with pytest.raises(pm.PackError):
        inspect(path)


def test_a_newer_format_is_refused_by_its_number(tmp_path, base):
    path = tmp_path / "new.safetensors"
    raw_file(path, b'{"__metadata__":{"polymask":"{\\"format\\":99,\\"library\\":\\"9.0\\"}"}}')
    with pytest.raises(pm.PackError, match=r"has pack format 99.*use the version that wrote it"):
        pm.load_domain(path, base)


def test_loading_allocates_no_more_than_a_small_multiple_of_the_file(base, pack, tmp_path):
    size = pack.stat().st_size
    cases = [pack.read_bytes(), *corruptions(pack.read_bytes(), 160)]
    path = tmp_path / "hostile.safetensors"
    for name in ("a huge mask", "a bomb"):
        manifest, tensors, _ = HOSTILE[name]
        altered(pack, path, manifest=manifest, tensors=tensors)
        cases.append(path.read_bytes())
    pm.load_domain(pack, base)  # what is imported or cached once does not count
    for data in cases:
        path.write_bytes(data)
        tracemalloc.start()
        with contextlib.suppress(pm.PackError):
            pm.load_domain(path, base)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20 * max(size, len(data)) + (1 << 18)


def test_a_domain_with_values_that_are_not_finite_is_not_written(base, tmp_path):
    domain = trained(base)
    with torch.no_grad():
        domain.head.bias[0] = float("nan")
    with pytest.raises(pm.PackError, match="head/bias of the domain holds values"):
        domain.save(tmp_path / "d.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_note_that_is_not_finite_is_not_written(base, tmp_path):
    domain = trained(base)
    domain.metrics = {"loss": float("nan")}
    with pytest.raises(pm.PackError, match="a note in its manifest"):
        domain.save(tmp_path / "d.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("note", [{"x": object()}, {1: 2, "a": 3}, {"x": float("inf")}])
def test_notes_that_are_not_json_are_not_written(base, tmp_path, note):
    domain = trained(base)
    domain.metrics = note
    with pytest.raises(pm.PackError, match="a note in its manifest"):
        domain.save(tmp_path / "d.safetensors")


def test_notes_with_numbers_as_keys_can_be_read_back(base, tmp_path):
    domain = trained(base)
    domain.metrics = {"by epoch": {9: 1.0, 10: 2.0}}
    domain.save(tmp_path / "d.safetensors")
    loaded = pm.load_domain(tmp_path / "d.safetensors", base)
    assert loaded.metrics == {"by epoch": {"9": 1.0, "10": 2.0}}


def test_a_method_without_a_registered_name_is_not_written(base, tmp_path):
    domain = pm.new_domain(base, Affine(), ["a", "b"])
    with pytest.raises(pm.PackError, match="the method has no registered name"):
        domain.save(tmp_path / "d.safetensors")


def test_a_single_number_round_trips_with_its_shape(tmp_path):
    manifest = Manifest("m", {}, "b", "f", {}, None)
    write_pack(tmp_path / "p.safetensors", manifest, {"v": np.float32(3)})
    assert read_pack(tmp_path / "p.safetensors")[1]["v"].shape == ()


def test_a_pack_does_not_depend_on_the_sites_that_the_base_was_loaded_with(tmp_path):
    some, all_sites = tiny_base(include=["stem", "plain"]), tiny_base()
    domain = trained(some)
    domain.save(tmp_path / "d.safetensors")
    loaded = pm.load_domain(tmp_path / "d.safetensors", all_sites)
    assert list(loaded.sites) == ["stem.weight", "plain.weight"]
    assert torch.equal(logits(all_sites, loaded), logits(some, domain))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(domain, tmp_path, monkeypatch):
    path = tmp_path / "d.safetensors"
    domain.save(path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(pm.PackError, match="cannot be written: No space left"):
        domain.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["d.safetensors"]


def test_a_folder_is_made_for_a_pack(domain, base, tmp_path):
    domain.save(tmp_path / "new" / "library" / "d.safetensors")
    assert pm.load_domain(tmp_path / "new" / "library" / "d.safetensors", base).classes == domain.classes


def test_a_folder_that_cannot_be_made_and_a_missing_file_are_named(domain, base, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(pm.PackError, match=r"cannot be written: (Not a directory|File exists)"):
        domain.save(tmp_path / "file" / "d.safetensors")
    with pytest.raises(pm.PackError, match="cannot be read: No such file"):
        pm.load_domain(tmp_path / "nothing.safetensors", base)


def test_inspecting_needs_neither_torch_nor_numpy(pack):
    code = (
        "import sys, polymask; info = polymask.inspect(sys.argv[1]);"
        "assert info.manifest.method == 'affine-full';"
        "assert info.tensors['transform/stem.weight/mask'] == 27;"
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(pack)], check=True)


def test_inspecting_gives_the_sizes_of_all_parts(pack):
    info = inspect(pack)
    assert info.bytes == pack.stat().st_size
    assert 0 < sum(info.tensors.values()) < info.bytes
    assert info.manifest.metrics == {"test_accuracy": 12.5}


def with_another(change):
    net = tiny_net()
    for module in net.modules():
        change(module)
    return pm.load_base(net, input=SPEC)


def larger_eps(module):
    if isinstance(module, torch.nn.BatchNorm2d):
        module.eps = 0.1


def other_padding(module):
    if isinstance(module, torch.nn.Conv2d) and module.padding != (0, 0):
        module.padding_mode = "circular"
        module._reversed_padding_repeated_twice = [p for p in reversed(module.padding) for _ in range(2)]


@pytest.mark.parametrize("change", [larger_eps, other_padding])
def test_a_base_with_the_same_weights_that_computes_something_else_is_refused(change, tmp_path):
    same, other = with_another(lambda module: None), with_another(change)
    assert same.fingerprint == other.fingerprint
    pm.new_domain(same, "affine-full", ["a", "b"]).save(tmp_path / "d.safetensors")
    pm.load_domain(tmp_path / "d.safetensors", same)
    with pytest.raises(pm.PackError, match="computes something else"):
        pm.load_domain(tmp_path / "d.safetensors", other)
