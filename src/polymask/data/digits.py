"""Handwritten digits, from scikit-learn: 1,797 pictures of 8 × 8 pixels, ten classes."""

import numpy as np

from polymask.data.extras import require, require_vision
from polymask.data.images import DomainData
from polymask.data.split import ArraySplit, SubsetSplit
from polymask.data.stratify import TRAIN_VAL_TEST, stratified

# Seven times larger, since 8 pixels leave a random crop few places to be; the margin is what a
# centre crop of 7/8 takes away.
_SCALE, _PAD = 7, ((0, 0), (4, 4), (4, 4))


def load_digits() -> DomainData:
    """Load the digits, enlarged to 64 × 64 and cut 70 / 15 / 15, always alike."""
    pil = require_vision("PIL.Image")
    digits = require("sklearn.datasets", "'polymask[demo]'").load_digits()
    small = np.round(digits.images * (255 / 16)).astype(np.uint8)  # the values are 0 … 16
    side = 8 * _SCALE
    large = [pil.fromarray(image).resize((side, side), pil.Resampling.BICUBIC) for image in small]
    images = np.pad(np.stack([np.asarray(image) for image in large]), _PAD)
    whole = ArraySplit("digits", images, digits.target)
    train, val, test = (SubsetSplit(whole, part) for part in stratified(whole.labels, TRAIN_VAL_TEST, seed=0))
    return DomainData("digits", tuple("0123456789"), train, val, test, mirror=False)
