"""What is removed with a domain, and what stays."""

from polymask.lifelong.removal import remove_pack


def test_a_domain_takes_its_versions_and_images_with_it_and_nothing_of_others(tmp_path):
    mine = ["cat.safetensors", "cat.exemplars", "cat@1.version", "cat@12.version"]
    others = ["ca.safetensors", "cat.b.exemplars", "cat.b@1.version", "cats@1.version", "emr-0.shared"]
    for name in mine + others:
        (tmp_path / name).write_bytes(b"")
    remove_pack(tmp_path / "cat.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_a_domain_without_anything_beside_it_is_removed(tmp_path):
    (tmp_path / "cat.safetensors").write_bytes(b"")
    remove_pack(tmp_path / "cat.safetensors")
    assert list(tmp_path.iterdir()) == []
