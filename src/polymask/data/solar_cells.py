"""Defects of solar cells, from elpv-dataset: 2,624 electroluminescence photos, two classes.

Experts judged each cell functional or defective, and said whether they were sure; the dataset
gives that as a defect probability of 0 (1,508 cells), 1/3 (295), 2/3 (106) or 1 (715). We take the
judgement and leave the doubt: below one half is "functional" (68.7 % of the cells), above is
"defective". All photos are kept: dropping the unsure ones would make the domain easier than the
work it stands for. Papers differ in how they label the unsure cells, so accuracies here are not to
be set beside published ones (Deitsch et al., Solar Energy 2019: 88.4 % with a CNN, 75 % for train).

A quarter is test, and 15 % of the rest is val, in proportion to probability and cell type. Cells of
one module may fall on both sides, since the dataset does not say which module a cell is from.
"""

import importlib.util
from pathlib import Path

import numpy as np

from polymask.data.images import DomainData
from polymask.data.split import FileSplit, SubsetSplit
from polymask.data.stratify import TRAIN_VAL, stratified
from polymask.errors import DataError

_TRAIN_TEST = (0.75, 0.25)


def load_solar_cells() -> DomainData:
    """Load the cells, always cut alike. Licence of the photos: CC BY-NC-SA 4.0."""
    spec = importlib.util.find_spec("elpv_dataset")
    if spec is None or spec.origin is None:
        raise DataError("elpv-dataset is not installed; pip install 'polymask[demo]'")
    folder = Path(spec.origin).parent / "data"
    rows = [line.split() for line in (folder / "labels.csv").read_text("utf-8").splitlines()]
    rows = [row for row in rows if row]
    probability = np.array([float(row[1]) for row in rows])
    whole = FileSplit([folder / row[0] for row in rows], (probability > 0.5).astype(np.int64))
    monocrystalline = np.array([row[2] == "mono" for row in rows])
    strata = np.round(3 * probability).astype(np.int64) * 2 + monocrystalline
    rest, test = stratified(strata, _TRAIN_TEST, seed=0)
    train, val = (rest[part] for part in stratified(strata[rest], TRAIN_VAL, seed=0))
    return DomainData(
        "solar-cells",
        ("functional", "defective"),
        SubsetSplit(whole, train),
        SubsetSplit(whole, val),
        SubsetSplit(whole, test),
    )
