"""A mould takes on pack after pack, and is each time exactly what a domain that is loaded anew would be."""

import dataclasses
import os
import time

import numpy as np
import pytest
import torch

import polymask as pm
from nets import batch, logits, tiny_base, trained
from polymask.core.heads import in_blocks
from polymask.library.cache import MergedCache, Source
from polymask.pack import format as pack_format
from polymask.pack.codec import BitArray
from polymask.pack.format import read_pack, write_pack
from polymask.pack.mould import Mould, poured
from polymask.pack.storing import OpenPack
from polymask.train.unknown import Observed, fit_unknown

CLASSES = {"a": 3, "b": 5, "c": 3}


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def packs(base, tmp_path_factory):
    """Packs of one kind, by name: masks, numbers, classes and notes differ."""
    folder = tmp_path_factory.mktemp("packs")
    for seed, (name, classes) in enumerate(CLASSES.items()):
        domain = trained(base, classes=classes, seed=seed, scores=(-1.0, 1.0))
        domain.metrics = {"test_accuracy": float(seed)}
        domain.save(folder / f"{name}.safetensors")
    return {name: folder / f"{name}.safetensors" for name in CLASSES}


def contents(domain: pm.Domain) -> dict[str, bytes]:
    return {n: getattr(t, "words", t).numpy().tobytes() for n, t in domain.stored().items()}


def assert_same(base: pm.Base, domain: pm.Domain, path) -> None:
    fresh = pm.load_domain(path, base)
    assert contents(domain) == contents(fresh)
    assert (domain.classes, domain.metrics, domain.recipe) == (fresh.classes, fresh.metrics, fresh.recipe)
    assert (domain.input, domain.target, domain.base_response) == (fresh.input, fresh.target, fresh.base_response)
    assert torch.equal(logits(base, domain), logits(base, fresh))


def test_a_mould_is_each_pack_in_turn(base, packs):
    mould = poured(packs["a"], base)
    assert_same(base, mould.domain, packs["a"])
    for name in ("b", "c", "a"):
        assert poured(packs[name], base, mould) is mould
        assert_same(base, mould.domain, packs[name])


def test_a_pack_of_another_kind_gets_a_mould_of_its_own(base, packs, tmp_path):
    trained(base, "piggyback").save(tmp_path / "other.safetensors")
    mould = poured(packs["a"], base)
    other = poured(tmp_path / "other.safetensors", base, mould)
    assert other is not mould
    assert_same(base, other.domain, tmp_path / "other.safetensors")
    assert_same(base, mould.domain, packs["a"])


@pytest.mark.parametrize("method", ["taps", "bitdelta", "packnet", "finetune"])
def test_a_method_that_does_not_say_that_it_can_be_written_over_gets_a_domain_each_time(base, method, tmp_path):
    trained(base, method).save(tmp_path / "d.safetensors")
    mould = poured(tmp_path / "d.safetensors", base)
    assert poured(tmp_path / "d.safetensors", base, mould) is not mould
    assert_same(base, mould.domain, tmp_path / "d.safetensors")


MASK = "transform/stem.weight/mask"
WRONG = {
    "a short mask": {MASK: BitArray((8, 3, 3, 3), "raw", bytes(26))},
    "a damaged mask": {MASK: BitArray((8, 3, 3, 3), "deflate", b"\xff" * 9)},
    "not a number": {"transform/stem.weight/k1": np.full(1, np.nan, np.float32)},
    "a head of another shape": {"head/bias": np.zeros(7, np.float32)},
    "an endless head": {"head/bias": np.full(3, np.inf, np.float32)},
}


@pytest.mark.parametrize("case", WRONG)
def test_a_pack_that_is_wrong_is_refused_and_leaves_the_mould_as_it_was(base, packs, case, tmp_path):
    manifest, tensors = read_pack(packs["c"])
    write_pack(tmp_path / "wrong.safetensors", manifest, {**tensors, **WRONG[case]})
    mould = poured(packs["a"], base)
    with pytest.raises(pm.PackError, match=r"wrong\.safetensors"):
        poured(tmp_path / "wrong.safetensors", base, mould)
    assert_same(base, mould.domain, packs["a"])


def test_a_mask_of_another_shape_or_a_foreign_tensor_never_fills_a_mould(base, packs, tmp_path):
    manifest, tensors = read_pack(packs["c"])
    changes = ({MASK: BitArray((3, 8, 3, 3), "raw", bytes(27))}, {"transform/x/k1": np.zeros(1, np.float32)})
    for change in changes:
        write_pack(tmp_path / "odd.safetensors", manifest, {**tensors, **change})
        mould = poured(packs["a"], base)
        with pytest.raises(pm.PackError):
            poured(tmp_path / "odd.safetensors", base, mould)
        assert_same(base, mould.domain, packs["a"])


@pytest.mark.parametrize("rule", ["energy", "mahalanobis"])
def test_packs_with_and_without_a_rule_for_unknown_images_fill_one_mould(base, packs, rule, tmp_path):
    domain = trained(base, seed=7, scores=(-1.0, 1.0))
    images, labels = batch(40)
    with torch.no_grad():
        features = domain.eval().features(base, images)
        seen = Observed(features, domain.classify(features), labels)
    domain.unknown = fit_unknown(rule, seen, seen)
    domain.save(tmp_path / "d.safetensors")
    mould = poured(packs["a"], base)
    for _ in range(2):
        assert poured(tmp_path / "d.safetensors", base, mould) is mould
        expected = pm.load_domain(tmp_path / "d.safetensors", base).scored()
        assert torch.equal(logits(base, mould.domain), logits(base, expected))
        assert logits(base, mould.domain).shape == (8, 4)
        assert poured(packs["b"], base, mould) is mould
        assert_same(base, mould.domain, packs["b"])
    first = poured(tmp_path / "d.safetensors", base)
    assert poured(packs["b"], base, first) is first
    assert_same(base, first.domain, packs["b"])


def test_an_older_pack_fills_a_mould_too(base, packs, tmp_path):
    manifest, tensors = read_pack(packs["b"])
    wide = {n: t.astype(np.float32) if getattr(t, "dtype", None) == np.float16 else t for n, t in tensors.items()}
    write_pack(tmp_path / "old.safetensors", dataclasses.replace(manifest, format=1), wide)
    mould = poured(packs["a"], base)
    assert poured(tmp_path / "old.safetensors", base, mould) is mould
    assert contents(mould.domain) == contents(pm.load_domain(packs["b"], base))


def test_a_full_cache_writes_the_next_pack_into_the_network_that_has_to_go(base, packs):
    big = MergedCache(base, 1 << 40)
    with big.use("a", Source.of(packs["a"], base)):
        pass
    cache = MergedCache(base, big.stats.bytes + 200)
    expected = {name: logits(base, pm.load_domain(path, base)) for name, path in packs.items()}
    places = set()
    for name in ("a", "b", "c", "b", "a"):
        with torch.no_grad(), cache.use(name, Source.of(packs[name], base)) as net:
            torch.testing.assert_close(net(batch()[0]), expected[name])
            places.add(net.stem.weight.data_ptr())
        assert cache.names() == [name]
    assert len(places) == 1
    assert (cache.stats.misses, cache.stats.evictions) == (5, 4)
    with big.use("b", Source.of(packs["b"], base)):
        pass
    with cache.use("b", Source.of(packs["b"], base)):
        assert cache.stats.bytes == big.stats.bytes - cost(base, packs["a"])


def cost(base, path) -> int:
    cache = MergedCache(base, 1 << 40)
    with cache.use("x", Source.of(path, base)):
        return cache.stats.bytes


def test_a_pack_that_cannot_be_read_costs_the_cache_no_more_than_a_network(base, packs, tmp_path):
    manifest, tensors = read_pack(packs["c"])
    write_pack(tmp_path / "wrong.safetensors", manifest, {**tensors, **WRONG["not a number"]})
    cache = MergedCache(base, cost(base, packs["a"]))
    with cache.use("a", Source.of(packs["a"], base)):
        pass
    with pytest.raises(pm.PackError), cache.use("wrong", Source.of(tmp_path / "wrong.safetensors", base)):
        pass
    with torch.no_grad(), cache.use("a", Source.of(packs["a"], base)) as net:
        torch.testing.assert_close(net(batch()[0]), logits(base, pm.load_domain(packs["a"], base)))
    assert cache.stats.bytes <= cache.budget_bytes


def test_the_sha256_of_a_file_is_checked_once(base, packs, tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(pack_format, "_SETTLED", 0)
    original = pack_format._sha256
    monkeypatch.setattr(pack_format, "_sha256", lambda *parts: checked.append(1) or original(*parts))
    path = tmp_path / "d.safetensors"
    path.write_bytes(packs["a"].read_bytes())
    for _ in range(3):
        OpenPack.read(path, base)
    assert len(checked) == 1
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    before = path.stat()
    time.sleep(0.02)  # a tick of the file system's clock
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the same size and time, but not the same state
    with pytest.raises(pm.PackError, match="sha256"):
        OpenPack.read(path, base)


def test_the_sha256_of_a_file_that_changed_a_moment_ago_is_checked_again(base, packs, tmp_path, monkeypatch):
    monkeypatch.setattr(pack_format, "_INTACT", {})
    path = tmp_path / "d.safetensors"
    path.write_bytes(packs["a"].read_bytes())
    OpenPack.read(path, base)
    assert pack_format._INTACT == {}


def test_stamps_are_forgotten_where_there_are_too_many(monkeypatch):
    monkeypatch.setattr(pack_format, "_INTACT", {})
    monkeypatch.setattr(pack_format, "_REMEMBERED", 3)
    for inode in range(9):
        pack_format._remember((0, inode, 0, 0, 0))
    assert [stamp[1] for stamp in pack_format._INTACT] == [6, 7, 8]


def test_masks_of_a_mould_are_counted(base, packs):
    mould = Mould(OpenPack.read(packs["a"], base))
    assert mould.mask_bytes >= sum(site.numel for site in base.sites.values()) / 8


def test_a_pack_whose_classes_came_in_blocks_is_poured_with_them(base, packs, tmp_path):
    domain = pm.load_domain(packs["b"], base)
    domain.head = in_blocks(domain.head, [3, 2])
    domain.save(tmp_path / "grown.safetensors")
    mould = poured(packs["a"], base)
    assert poured(tmp_path / "grown.safetensors", base, mould) is mould
    assert mould.domain.head.blocks == (3, 2)
    assert_same(base, mould.domain, tmp_path / "grown.safetensors")
