"""Images of a domain: sources, cuts, checks, and batches that are the same every time."""

from polymask.data.cache import (
    Cache,
    DomainCache,
    cache_domain,
    cache_splits,
    check,
    short_side,
    shrink_for,
)
from polymask.data.images import DomainData, Submission
from polymask.data.load import load_data
from polymask.data.loader import Batch, Loader
from polymask.data.samples import Samples
from polymask.data.shrink import Shrink
from polymask.data.split import ArraySplit, FileSplit, JoinedSplit, Split, SubsetSplit, WrappedSplit
from polymask.data.transforms import Transform, eval_transform, train_transform

__all__ = [
    "ArraySplit",
    "Batch",
    "Cache",
    "DomainCache",
    "DomainData",
    "FileSplit",
    "JoinedSplit",
    "Loader",
    "Samples",
    "Shrink",
    "Split",
    "Submission",
    "SubsetSplit",
    "Transform",
    "WrappedSplit",
    "cache_domain",
    "cache_splits",
    "check",
    "eval_transform",
    "load_data",
    "short_side",
    "shrink_for",
    "train_transform",
]
