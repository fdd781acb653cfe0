"""SupSup: a mask over a network that never learns.

    W~ = W∘M,        M = 1[R >= 0]

It is the affine form with k0 = k1 = k2 = 0 and k3 = 1, as Piggyback, with scores R drawn around the threshold: a fresh
domain has half of the weights, at random. The original's network is random itself, so that nothing is lost by this; to
have that, load the base with `pretrained=False`. A pretrained base loses half of its weights at the start, and
`piggyback`, which starts with all of them, does not.
"""

from dataclasses import dataclass
from typing import ClassVar

from polymask.core.method import Method
from polymask.methods.affine.method import Affine


@dataclass(frozen=True, kw_only=True)
class SupSup(Affine):
    """W~ = W∘M from scores around the threshold; options as those of `piggyback`."""

    title: ClassVar[str] = "SupSup"
    reference: ClassVar[str] = "arXiv 2006.14769"
    differences: ClassVar[str] = (
        "This is the faster of the original's two masks, which keeps scores above zero; the other keeps a fixed share "
        "of the largest scores in each layer, which thresholds do not hold. The range of the scores is one for all "
        "layers, the original's Kaiming's for each. Its batch norms have no scale and shift, and statistics for each "
        "task: here the base's scale and shift, and own statistics. Which domain an image is of is given, not inferred "
        "from the entropy of a mix of masks. `wsn` keeps a fixed share of the scores, and learns the weights as well."
    )


PRESETS: dict[str, Method] = {"supsup": SupSup(k0=0.0, k1=0.0, k2=0.0, k3=1.0, norms="stats", scores=(-1e-2, 1e-2))}
