"""Which kernels are used, and what happens where they cannot be."""

import logging
import subprocess
import sys
import threading

import pytest

import polymask as pm
from polymask.methods.affine import compiled, formula


def test_kernels_that_cannot_be_compiled_are_eager_with_one_line(monkeypatch, caplog):
    def fail(*inputs):
        raise RuntimeError("no C++ compiler was found\nand more lines")

    monkeypatch.setattr(compiled, "_run", fail)
    formula._trouble.cache_clear()
    with caplog.at_level(logging.WARNING, "polymask"):
        assert pm.set_kernels("compiled") == "eager"
    formula._trouble.cache_clear()
    assert caplog.messages == ["kernels cannot be compiled here (no C++ compiler was found); eager ones are used"]
    assert not formula.compiled_kernels()


def test_kernels_of_another_kind_are_refused():
    with pytest.raises(pm.PolymaskError, match="'fast' are not known; they are eager, compiled or auto"):
        pm.set_kernels("fast")


def test_the_environment_chooses_where_nothing_else_does(monkeypatch):
    monkeypatch.setattr(formula, "_chosen", None)
    monkeypatch.setattr(formula, "_trouble", lambda: None)
    monkeypatch.setenv("POLYMASK_KERNELS", "compiled")
    assert formula.compiled_kernels()


@pytest.fixture
def compiling(monkeypatch):
    """A compiler that works until it is told to go on, and then fails where it is told so."""
    go_on, failure, threads = threading.Event(), [], []

    def compile_slowly():
        threads.append(threading.current_thread())
        assert go_on.wait(10)
        if failure:
            raise RuntimeError("no compiler\nnone at all")

    monkeypatch.setattr(compiled, "try_inference", compile_slowly)
    monkeypatch.setattr(formula, "_chosen", "eager")

    def finish(*, fail: bool = False) -> None:
        failure.extend([fail] if fail else [])
        go_on.set()
        for thread in [one for one in threading.enumerate() if one.name == "polymask-compile"]:
            thread.join(10)

    return finish


def test_kernels_are_eager_until_those_that_are_compiled_aside_are_there(compiling):
    assert pm.set_kernels("auto") == "eager"
    assert not formula.compiled_kernels()
    compiling()
    assert formula.compiled_kernels()


def test_kernels_stay_eager_where_none_can_be_compiled_aside(compiling):
    pm.set_kernels("auto")
    compiling(fail=True)
    assert not formula.compiled_kernels()


def test_what_is_chosen_while_kernels_are_compiled_aside_holds(compiling):
    pm.set_kernels("auto")
    pm.set_kernels("eager")
    compiling()
    assert not formula.compiled_kernels()


@pytest.mark.slow
def test_kernels_that_were_compiled_aside_serve_networks_of_any_size_without_compiling_again():
    code = """
import torch, polymask as pm, time
from torch._dynamo.utils import counters
from polymask.methods.affine import formula
pm.set_kernels("auto")
while not formula.compiled_kernels():
    time.sleep(0.1)
before = counters["stats"]["unique_graphs"]
for width in (40, 64):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, width, 3), torch.nn.Conv2d(width, 90, 3), torch.nn.Flatten())
    base = pm.load_base(net, input=pm.InputSpec(shape=(3, 8, 8)), classifier=None)
    domain = pm.new_domain(base, "affine-full", ["a", "b"]).frozen()
    model = pm.MultiDomainModel(base)
    model.add("d", domain)
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.allclose(model(images, domain="d"), domain(base, images), atol=1e-5)
assert counters["stats"]["unique_graphs"] == before, counters
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_without_a_compiler_training_goes_on_with_a_notice(tmp_path):
    code = "import polymask as pm; print(pm.set_kernels('compiled'))"
    environment = {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "", "HOME": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "eager"
    assert done.stderr.count("\n") == 1
    assert "kernels cannot be compiled here" in done.stderr
