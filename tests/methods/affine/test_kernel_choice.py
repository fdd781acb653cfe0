"""Which kernels are used, and what happens where they cannot be."""

import logging
import subprocess
import sys

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
    with pytest.raises(pm.PolymaskError, match="'fast' are not known; they are eager or compiled"):
        pm.set_kernels("fast")


def test_the_environment_chooses_where_nothing_else_does(monkeypatch):
    monkeypatch.setattr(formula, "_chosen", None)
    monkeypatch.setattr(formula, "_trouble", lambda: None)
    monkeypatch.setenv("POLYMASK_KERNELS", "compiled")
    assert formula.compiled_kernels()


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
