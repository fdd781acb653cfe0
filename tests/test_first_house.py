"""Packs and checkpoints that were written before the modules moved to their rooms."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import polymask as pm
from nets import SPEC, BlockNet, TinyNet
from polymask.errors import PackWarning
from polymask.pack.codec import BitArray
from polymask.pack.format import read_pack
from polymask.train.fit import Listener
from sequences import RECIPE, lesson

FIRST_HOUSE = Path(__file__).parent / "first_house"
NETS = {"learned": (TinyNet, 8), "blocks": (BlockNet, 10)}
PACKS = sorted(path.stem for path in FIRST_HOUSE.glob("*.*.safetensors"))
CUT = sorted(path.name for path in (FIRST_HOUSE / "cut").iterdir())


def base_of(method: str) -> pm.Base:
    name = "learned" if pm.create_method(method).mergeable else "blocks"
    kind, classes = NETS[name]
    net = kind(classes)
    net.load_state_dict(load_file(FIRST_HOUSE / f"{name}.safetensors"))
    return pm.load_base(net, name=name, input=SPEC)


@pytest.mark.parametrize("pack", PACKS)
def test_an_old_pack_loads_to_the_bit_and_says_what_it_said(pack, tmp_path):
    base, path = base_of(pack.split(".")[0]), FIRST_HOUSE / f"{pack}.safetensors"
    with pytest.warns(PackWarning, match="only its weights"):
        domain = pm.load_domain(path, base)
    domain.save(tmp_path / path.name)
    old, new = (read_pack(one)[1] for one in (path, tmp_path / path.name))
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        bits = isinstance(tensor, BitArray)
        assert tensor == new[name] if bits else np.array_equal(tensor, new[name])  # in 16 bits where these hold it

    said = load_file(FIRST_HOUSE / "logits.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(domain(base, said["images"]), said[pack], rtol=1e-4, atol=1e-4)


class StopAtOnce(Listener):
    """Asks to stop before the first step."""

    def begin(self, recipe, steps, epoch):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("method", CUT)
def test_a_training_that_was_cut_long_ago_goes_on_from_there(method, tmp_path):
    shutil.copytree(FIRST_HOUSE / "cut" / method, tmp_path, dirs_exist_ok=True)
    (checkpoint,) = tmp_path.glob("learned/*.checkpoint")
    old = load_file(checkpoint)
    lessons = {"stripes": lesson(1), "spots": lesson(2)}
    arguments = (base_of(method), lessons, method, RECIPE)

    with pytest.raises(pm.InterruptedTraining):
        pm.fit_all(*arguments, folder=tmp_path, resume=True, listener=StopAtOnce())
    new = load_file(checkpoint)
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)

    fitted = pm.fit_all(*arguments, folder=tmp_path, resume=True)
    assert all(len(records) == RECIPE.epochs for records in fitted.histories.values())
