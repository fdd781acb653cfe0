"""VeRA: low-rank updates by two vectors a site, between random matrices that all sites share.

    mat(W~) = mat(W) + diag(b) B diag(d) A

mat(W) is as for LoRA: C_out rows, one filter each. A (rank x columns) and B (C_out x rank) are drawn once and never
learn; d (rank,) and b (C_out,) learn. All sites have the same A and B: a site takes as many rows and columns of two
tables without end as it has, times Kaiming's range for its own size, sqrt(6 / columns) and sqrt(6 / rank).

A pack holds b and d, and `table_seed` among the method's options. The tables are made from it by a rule that is the
same on every machine: row i of table t holds

    (2 k + 1) / 2^24 - 1,        k = the upper 24 of 64 bits

of the stream of Philox 4x64-10 with the key (table_seed, t), from the counter (0, i, 0, 0) on; t is 0 for A and 1 for
B. These numbers are exact in single precision, and no version of torch or numpy draws others.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from polymask.core.method import Method
from polymask.core.parts import Stored
from polymask.core.survey import Site
from polymask.methods.lora import MatrixUpdate

A_TABLE, B_TABLE = 0, 1


@dataclass(frozen=True, kw_only=True)
class Vera(Method):
    """mat(W~) = mat(W) + diag(b) B diag(d) A, where b starts at zero and d at `start`.

    A site that has fewer rows or columns than `rank` gets as many as it has.
    """

    rank: int = 256
    start: float = 0.1
    table_seed: int = 0

    title: ClassVar[str] = "VeRA"
    reference: ClassVar[str] = "arXiv 2310.11454"
    differences: ClassVar[str] = (
        "The original shares A and B among layers of one shape; here, as in PEFT, layers of other shapes take a part "
        "of them, but each with Kaiming's range of its own size. PEFT draws A and B by torch, whose numbers may differ "
        "between versions and devices, and by default stores them; here they come from the seed alone. Every site has "
        "an update, convolutions too. No dropout."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_whole("rank", 1, 4096)
        self.check_range("start", 0.0, 100.0)
        self.check_whole("table_seed", 0, 1_000_000_000)

    def transform(self, site: Site) -> "Vectors":
        return Vectors(self, site)


class Vectors(MatrixUpdate):
    """One site's d (rank,) and b (C_out,)."""

    components: ClassVar[Mapping[str, str]] = {"d": "weights", "b": "weights"}

    def __init__(self, method: Vera, site: Site) -> None:
        super().__init__(site)
        self.seed, self.rank = method.table_seed, min(method.rank, self.rows, self.columns)
        dtype = site.learned_dtype
        self.d = nn.Parameter(torch.full((self.rank,), method.start, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(self.rows, dtype=dtype))
        self.tables = self._tables()

    def restore(self, stored: Mapping[str, Stored]) -> None:
        super().restore(stored)
        self.tables = self._tables()

    def weight(self, base_weight: Tensor) -> Tensor:
        with torch.autocast(base_weight.device.type, enabled=False):
            A, B = self.matrices()
            update = self.b[:, None] * (B @ (self.d[:, None] * A))
            return self.added(base_weight, update).to(base_weight.dtype)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """A (rank, columns) and B (C_out, rank)."""
        assert self.tables is not None
        A, B = self.tables.A.to(self.d.dtype), self.tables.B.to(self.d.dtype)
        return math.sqrt(6 / self.columns) * A, math.sqrt(6 / self.rank) * B

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Go to another device, where the tables are made once for all sites."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tables = self._tables()
        return self

    def _tables(self) -> "Tables | None":
        return None if self.d.is_meta else Tables(self)


class Tables:
    """The part of both tables that a site takes: memory of all sites, so a copy of a domain has the same."""

    def __init__(self, site: Vectors) -> None:
        self.A = uniform_table(site.seed, A_TABLE, site.rank, site.columns, site.d.device)
        self.B = uniform_table(site.seed, B_TABLE, site.rows, site.rank, site.d.device)

    def __deepcopy__(self, memo: object) -> "Tables":
        return self


def uniform_table(seed: int, table: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """The first rows and columns of a table of numbers in (-1, 1); a larger one begins with the same."""
    sides = (1 << (rows - 1).bit_length(), 1 << (columns - 1).bit_length())  # few sizes, so that sites share memory
    return _whole_table(seed, table, *sides, device)[:rows, :columns]


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # training may be the next to use it
def _whole_table(seed: int, table: int, rows: int, columns: int, device: torch.device) -> Tensor:
    numbers = np.empty((rows, columns), dtype=np.float32)
    for row in range(rows):
        stream = np.random.Philox(key=[seed, table], counter=[0, row, 0, 0])
        k = (stream.random_raw(columns) >> np.uint64(40)).astype(np.int64)
        numbers[row] = (2 * k + 1 - (1 << 24)).astype(np.float64) / (1 << 24)
    return torch.from_numpy(numbers).to(device)


PRESETS: dict[str, Method] = {"vera": Vera()}
