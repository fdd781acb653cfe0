"""One domain on several devices: each process works on its piece of every batch.

The global batch of a step is the one that a single process would see; every rank takes a piece of
it, and gradients are summed with the pieces' shares as weights. So what is learned does not depend
on the number of processes, up to rounding, unless batch norms see a rank's piece only
(`sync_norms` lets them see the whole batch).
"""

from polymask.distributed.ranks import Ranks, join_ranks

__all__ = ["Ranks", "join_ranks"]
