"""A checkpoint that a disk or a person has changed is refused; a right one goes on as if nothing had happened."""

import random

import numpy as np
import pytest
import torch

from nets import SPEC
from polymask.data.cache import cache_splits
from polymask.data.loader import Loader
from polymask.data.preprocess import Preprocess
from polymask.data.split import ArraySplit, Shrink
from polymask.report.learn_page import read_log
from polymask.train.fit import EpochLog
from polymask.train.learner import EpochRecord
from polymask.train.recipe import Recipe
from polymask.train.state import CheckpointError, images_identity, load_checkpoint, save_checkpoint

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


def test_a_log_whose_last_line_was_cut_goes_on_with_whole_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    for cut in (b"", b'{"event": "epoch", "epo', b"\xff"):
        with path.open("ab") as file:
            file.write(cut)
        log = EpochLog(path, {"seed": 0})
        log.begin(Recipe(), 4, 0)
        log.epoch(EpochRecord(0, 0.5, 50.0, None), 1.0)
        log.end()
    assert len(path.read_bytes().splitlines()) == 6
    header, epochs = read_log(path)
    assert header["seed"] == 0
    assert [epoch["epoch"] for epoch in epochs] == [0]


def loader_of(pixels, labels):
    split = ArraySplit("made", pixels, labels)
    return Loader(*(cache_splits([split], Shrink(16))), Preprocess(SPEC), shuffle=True)


def test_a_run_does_not_go_on_with_other_images_labels_or_fewer_of_them():
    pixels = np.random.default_rng(0).integers(0, 255, (12, 16, 16, 3), dtype=np.uint8)
    labels = [0, 1] * 6
    replaced, swapped = pixels.copy(), pixels[::-1].copy()
    replaced[3] = 255 - replaced[3]
    first = images_identity(loader_of(pixels, labels))
    assert images_identity(loader_of(pixels.copy(), labels)) == first
    for other in ((replaced, labels), (swapped, labels), (pixels, [1, 0] * 6), (pixels[:-1], labels[:-1])):
        assert images_identity(loader_of(*other)) != first
