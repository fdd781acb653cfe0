"""Versions of a pack: what it was stays, and comes back to the bit."""

import pytest

import polymask as pm
from nets import tiny_base, trained
from polymask.errors import DomainError, PackError
from polymask.library.versions import current_version, find_version, keep_version, kept_versions, version_path
from polymask.pack.format import packs_in

BASE = tiny_base()


@pytest.fixture
def pack(tmp_path):
    trained(BASE, seed=0).save(tmp_path / "shapes.safetensors")
    return tmp_path / "shapes.safetensors"


def change(pack, seed):
    keep_version(pack)
    trained(BASE, seed=seed).save(pack)
    return pack.read_bytes()


def test_rollback_brings_back_what_was_to_the_bit_and_forward_again(pack):
    first = pack.read_bytes()
    second = change(pack, 1)
    third = change(pack, 2)
    assert pm.rollback(pack) == (3, 2)
    assert pack.read_bytes() == second
    assert pm.rollback(pack) == (2, 1)
    assert pack.read_bytes() == first
    assert pm.rollback(pack, 3) == (1, 3)
    assert pack.read_bytes() == third
    assert kept_versions(pack.parent) == {"shapes": [1, 2, 3]}


def test_a_pack_that_did_not_change_keeps_its_number(pack):
    assert keep_version(pack) == keep_version(pack) == current_version(pack) == 1
    change(pack, 1)
    assert current_version(pack) == 2


def test_versions_are_no_packs_of_the_library_and_load_by_their_name(pack):
    change(pack, 1)
    assert packs_in(pack.parent) == [pack]
    assert pm.MultiDomainModel(BASE, library=pack.parent, strict=True).domains == ["shapes"]
    found = find_version(pack.parent, "shapes@1")
    assert pm.load_domain(found, BASE).classes == ["class 0", "class 1", "class 2"]
    assert find_version(pack.parent, "shapes") is None


def test_what_is_not_there_is_said_and_nothing_changes(pack):
    before = pack.read_bytes()
    with pytest.raises(DomainError, match="no version before this one"):
        pm.rollback(pack)
    change(pack, 1)
    now = pack.read_bytes()
    with pytest.raises(DomainError, match=r"shapes has no version 7 in .*; kept are 1"):
        pm.rollback(pack, 7)
    version_path(pack, 1).write_bytes(before[:-9])
    with pytest.raises(PackError, match="damaged"):
        pm.rollback(pack, 1)
    assert pack.read_bytes() == now
    with pytest.raises(DomainError, match="has no version 9"):
        find_version(pack.parent, "shapes@9")


def test_versions_keep_their_order_when_old_ones_are_deleted(pack):
    change(pack, 1)
    second = pack.read_bytes()
    change(pack, 2)
    version_path(pack, 1).unlink()
    assert current_version(pack) == 3
    assert pm.rollback(pack) == (3, 2)
    assert pack.read_bytes() == second
