"""Methods are found by a scan of their folder: a file with `PRESETS` is all that a new one needs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import method_pages
import polymask as pm
import polymask.methods
from nets import batch, logits, tiny_base, trained
from polymask.core import registry

ROOT = Path(__file__).parents[2]


@pytest.fixture
def drop(tmp_path, monkeypatch):
    """Drops a file into a folder that is scanned besides our own; it is forgotten afterwards."""
    before = set(sys.modules)

    def dropped(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(polymask.methods, "__path__", [*polymask.methods.__path__, str(tmp_path)])
        monkeypatch.setattr(registry, "_METHODS", {})
        monkeypatch.setattr(registry, "_found", False)

    yield dropped
    for name in set(sys.modules) - before:
        if name.startswith("polymask.methods."):
            del sys.modules[name]


def the_example_for_contributors() -> str:
    """The file that CONTRIBUTING.md shows in whole."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (example,) = (block for block in blocks if "PRESETS" in block)
    return example


def test_a_file_with_presets_is_all_that_a_new_method_needs(drop, tmp_path):
    known = set(method_pages.families())
    drop("channel_scale.py", the_example_for_contributors())

    assert set(method_pages.families()) - known == {"channel_scale"}
    assert pm.list_methods("channel-*") == ["channel-scale"]

    base = tiny_base()
    domain = trained(base, "channel-scale", start=0.5)
    domain.save(tmp_path / "d.safetensors")
    loaded = pm.load_domain(tmp_path / "d.safetensors", base)
    assert loaded.method == pm.create_method("channel-scale", start=0.5)
    assert torch.equal(logits(base, loaded), logits(base, domain))
    with torch.no_grad():
        assert torch.equal(loaded.merged(base)(batch()[0]), logits(base, domain))
    assert 0 < pm.account(base, "channel-scale").bits_per_weight < 32

    methods = method_pages.families()["channel_scale"]
    assert method_pages.page(base, methods).startswith("# `channel-scale`\n\nChannel scales: W~ = s W")
    line = "      - Channel scale: methods/channel-scale.md\n"
    assert line in method_pages.navigation(method_pages.families())


def test_a_file_without_presets_brings_no_method(drop):
    known = pm.list_methods()
    drop("shared_by_some.py", "ANSWER = 42\n")
    assert pm.list_methods() == known


def test_what_is_not_a_method_is_refused_by_name():
    with pytest.raises(pm.MethodError, match="mine is a dict, not an instance of a Method"):
        pm.register("mine", {})


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(pm.MethodError, match="a method named affine-full is registered already"):
        pm.register("affine-full", pm.create_method("affine-full"))


def test_threads_that_ask_at_the_same_time_all_find_the_methods():
    """A server's threads may be the first to ask; none may see a list that is still being made."""
    program = """
import threading
from polymask.core.registry import create_method
start, failed = threading.Barrier(8), []

def ask():
    start.wait()
    try:
        create_method("wsn")
    except Exception as error:
        failed.append(error)

threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed[0]
"""
    subprocess.run([sys.executable, "-c", program], check=True)
