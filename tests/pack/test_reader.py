"""The readers that docs/pack-format.md shows, which share no code with polymask, read packs of every version alike."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import polymask as pm
from nets import tiny_base, trained
from polymask.pack.codec import BitArray
from polymask.pack.format import read_pack, write_pack

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pack-format.md").read_text()
VERSIONS = (1, 2, 4)  # 3 is 2 with a file beside it, which these readers leave to the caller


def code(language: str) -> str:
    """The piece of the page in a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)
    return found


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """One domain, by the version of its pack."""
    folder = tmp_path_factory.mktemp("packs")
    domain = trained(tiny_base(), scores=(-1.0, 1.0))
    domain.norms[next(iter(domain.norms))].weight.data.fill_(0.5)  # which 16 bits hold
    domain.save(folder / "4.safetensors")
    manifest, tensors = read_pack(folder / "4.safetensors")
    masks = [name for name, tensor in tensors.items() if isinstance(tensor, BitArray)]
    tensors[masks[0]] = BitArray.encoded(bytes(27), tensors[masks[0]].shape)
    wide = {n: t.astype(np.float32) if getattr(t, "dtype", None) == np.float16 else t for n, t in tensors.items()}
    for version in VERSIONS:
        kept = tensors if version == 4 else wide
        write_pack(folder / f"{version}.safetensors", replace(manifest, format=version), kept)
    return {version: folder / f"{version}.safetensors" for version in VERSIONS}


def expected(path: Path) -> dict[str, np.ndarray]:
    found = {}
    for name, tensor in read_pack(path)[1].items():
        if isinstance(tensor, BitArray):
            bits = np.unpackbits(np.frombuffer(tensor.decoded(), np.uint8), bitorder="little")
            tensor = bits[: np.prod(tensor.shape)].reshape(tensor.shape).astype(bool)
        found[name] = tensor
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_the_reader_in_python_reads_what_polymask_wrote(packs, version):
    scope: dict = {}
    exec(code("python"), scope)
    manifest, arrays = scope["read"](packs[version])
    wanted = expected(packs[version])
    assert manifest["format"] == version
    assert arrays.keys() == wanted.keys()
    assert all(arrays[name].dtype == wanted[name].dtype for name in wanted)
    assert all(np.array_equal(arrays[name], wanted[name]) for name in wanted)
    assert any(array.dtype == np.float16 for array in arrays.values()) == (version == 4)


def test_the_reader_in_python_reads_packs_of_the_first_polymask():
    scope: dict = {}
    exec(code("python"), scope)
    for path in sorted((ROOT / "tests" / "first_house").glob("*.spots.safetensors")):
        _, arrays = scope["read"](path)
        wanted = expected(path)
        assert arrays.keys() == wanted.keys()
        assert all(np.array_equal(arrays[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_reader_in_javascript_reads_what_polymask_wrote(packs, version, tmp_path):
    show = """
const { tensors } = read(process.argv[2]);
const bits = ({ shape, at }) => Array.from({ length: shape.reduce((a, b) => a * b, 1) }, (_, i) => at(i)).join("");
const plain = (t) => t.at ? bits(t) : [t.dtype, t.bytes.toString("hex")];
const shown = Object.entries(tensors).map(([name, t]) => [name, [t.shape, plain(t)]]);
console.log(JSON.stringify(Object.fromEntries(shown)));
"""
    (tmp_path / "read.js").write_text(code("javascript") + show)
    done = subprocess.run(["node", tmp_path / "read.js", packs[version]], check=True, capture_output=True, text=True)
    types = {"bool": None, "float32": "F32", "float16": "F16"}
    wanted = {}
    for name, array in expected(packs[version]).items():
        dtype = types[str(array.dtype)]
        bits = "".join("1" if bit else "0" for bit in array.reshape(-1))
        wanted[name] = [list(array.shape), bits if dtype is None else [dtype, array.tobytes().hex()]]
    assert json.loads(done.stdout) == wanted


def test_packs_of_all_versions_are_the_same_domain(packs):
    base = tiny_base()
    domains = [pm.load_domain(packs[version], base) for version in (1, 4)]
    first, second = ({n: getattr(t, "words", t) for n, t in domain.stored().items()} for domain in domains)
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
