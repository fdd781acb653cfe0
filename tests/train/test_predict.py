"""What a domain says of files is what it says of the same images in a test split."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nets import tiny_base, trained
from polymask.data.cache import cache_splits
from polymask.data.load import load_data
from polymask.data.loader import Loader
from polymask.data.preprocess import Preprocess, eval_transform
from polymask.train.predict import Classifier, logits


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("squash", [False, True])
def test_files_are_fed_as_the_domain_was_evaluated(tmp_path, squash, square):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(8):
            pixels = np.random.default_rng(i).integers(0, 255, (40, 70, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    base = tiny_base()
    domain = trained(base)
    domain.input = dataclasses.replace(base.input, squash=squash, square=square)
    data = dataclasses.replace(load_data(tmp_path), squash=squash)
    (cache,) = cache_splits([data.test], eval_transform(data, domain.input).shrink)
    images, _ = next(Loader(cache, eval_transform(data, domain.input)).batches())
    expected = logits(domain.merged(base), images).softmax(1)

    files = [Path(data.test.origin(i)) for i in range(len(data.test))]
    shares = Classifier(base, domain)(files)
    torch.testing.assert_close(shares, expected, rtol=0, atol=1e-6)
    feed = Preprocess(domain.input)  # the server's
    crops = [feed.piece(Image.open(file)) for file in files]
    torch.testing.assert_close(feed.batch(crops), images, rtol=0, atol=0)
