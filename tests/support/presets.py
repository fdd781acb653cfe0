"""The registered methods, and one preset of each kind for quick tests."""

import pytest

import polymask as pm

EVERY = pm.list_methods()
ROUTED = [name for name in EVERY if not pm.create_method(name).mergeable]
MERGEABLE = [name for name in EVERY if name not in ROUTED]
ONE_OF_A_KIND = {  # the first of its class, and those that store other tensors than it
    *{type(pm.create_method(name)): name for name in reversed(EVERY)}.values(),
    *("affine-full-channel", "affine-mix", "bn-only", "dan-diagonal", "piggyback"),
}


def quickly(quick, names=EVERY) -> list:
    """Parameters for tests of presets by name; only the slow tests run those that are not `quick`."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
