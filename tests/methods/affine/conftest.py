"""Kernels of either kind, chosen for one test."""

import pytest

from polymask.methods.affine import compiled, formula


@pytest.fixture(autouse=True)
def kernels_as_they_were(monkeypatch):
    monkeypatch.setattr(formula, "_chosen", "eager")


@pytest.fixture
def fused(monkeypatch):
    """Turns the fused transform on: called, it makes what follows use it."""
    monkeypatch.setattr(compiled, "_run", lambda function, *inputs: function(*inputs))
    return lambda: monkeypatch.setattr(formula, "_chosen", "compiled")


@pytest.fixture
def storages():
    """Gives the memory that the scores, or packed masks, of a domain lie in."""

    def found(domain):
        tensors = [t.words if t.scores is None else t.scores for _, t in domain.named_transforms()]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    return found
