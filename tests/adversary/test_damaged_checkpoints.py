"""A checkpoint that a disk or a person has changed is refused; a right one goes on as if nothing had happened."""

import random

import pytest
import torch

from polymask.train.state import CheckpointError, load_checkpoint, save_checkpoint

STATE = {
    "place": [1, 2, 0.5],
    "best": {
        "mask": torch.arange(7, dtype=torch.int32),
        "bias": torch.randn(5),
        "odd": torch.ones(3, dtype=torch.uint8),
    },
    "optimisers": {"head": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}},
}


@pytest.fixture
def saved(tmp_path):
    save_checkpoint(tmp_path / "checkpoint", STATE)
    return tmp_path / "checkpoint"


def test_no_flipped_bit_goes_unnoticed(saved):
    whole = saved.read_bytes()
    draw = random.Random(0)
    for _ in range(400):
        place, bit = draw.randrange(len(whole)), draw.randrange(8)
        saved.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match="not an intact checkpoint"):
            load_checkpoint(saved)


def test_no_cut_file_goes_unnoticed(saved):
    whole = saved.read_bytes()
    for size in range(0, len(whole), 7):
        saved.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="not an intact checkpoint"):
            load_checkpoint(saved)


def test_what_is_read_lies_where_fresh_tensors_lie_and_is_nobody_elses(saved):
    read = load_checkpoint(saved)
    saved.write_bytes(bytes(saved.stat().st_size))
    assert torch.equal(read["best"]["mask"], STATE["best"]["mask"])
    assert all(tensor.data_ptr() % 64 == 0 for tensor in read["best"].values())
