"""The processes that torchrun started, as one: what they agree on, what they sum, each one's piece of a batch."""

import gc
import json
import math
import os
import re
import signal
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from polymask import __version__
from polymask.core.network import choose_device
from polymask.data.batches import Batches
from polymask.data.loader import Loader
from polymask.errors import LostProcess, TrainingError
from polymask.files import digest
from polymask.train.evaluation import Evaluation, joined
from polymask.train.predict import examine, network, outputs
from polymask.train.state import Run

if TYPE_CHECKING:
    from polymask.core.base import Base
    from polymask.core.domain import Domain
    from polymask.train.fit import Stop
    from polymask.train.ranked_steps import SharedSession

_SAMPLED = 50  # images that stand for all when data is compared


class Shard:
    """The pieces of a rank, for training.

    Batch norm needs two images. So where a batch has fewer than two for each rank, every rank runs the whole of it,
    and only rank 0's counts. `counted` is the number of images of the batch given last that count.
    """

    def __init__(self, whole: Batches, rank: int, world: int) -> None:
        self.whole, self.rank, self.world = whole, rank, world
        self.counted = 0
        self.places: list[int] = []  # of the images that `counted_batches` gave, among all

    def __len__(self) -> int:
        return len(self.whole)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The pieces of an epoch's batches, from batch `start` on."""
        with closing(self._sized(epoch, start)) as pieces:
            for size, images, labels in pieces:
                self.counted = 0 if size < 2 * self.world and self.rank > 0 else len(labels)
                yield images, labels

    def counted_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The pieces that count: over all ranks every image once."""
        before, self.places = 0, []
        with closing(self._sized(0, 0)) as pieces:
            for size, images, labels in pieces:
                if size >= 2 * self.world or self.rank == 0:
                    first = before + (self.cut(size).start or 0)
                    self.places += range(first, first + len(labels))
                    yield images, labels
                before += size

    def cut(self, size: int) -> slice:
        """Which images of a batch of this size are in the piece."""
        if size < 2 * self.world:
            return slice(size)
        return slice(size * self.rank // self.world, size * (self.rank + 1) // self.world)

    def _sized(self, epoch: int, start: int) -> Generator[tuple[int, Tensor, Tensor], None, None]:
        """The size of each batch, and its piece."""
        if isinstance(self.whole, Loader):
            with closing(self.whole.pieces(self.cut, epoch, start)) as pieces:
                for size, piece in zip(self.whole.sizes()[start:], pieces, strict=True):
                    yield size, *piece
            return
        for images, labels in self.whole.batches(epoch, start):
            mine = self.cut(len(labels))
            yield len(labels), images[mine], labels[mine]


def describe(batches: Batches | None) -> dict[str, str]:
    """What two processes must have in common to have the same images."""
    if batches is None:
        return {"images": "none"}
    if not isinstance(batches, Loader):
        first = (tensor.contiguous().numpy().tobytes() for tensor in next(iter(batches.batches())))
        return {"batches": str(len(batches)), "first batch": digest(*first)[:12]}
    cache = batches.cache
    places = np.linspace(0, len(cache) - 1, min(_SAMPLED, len(cache))).astype(int)
    pixels = (cache.image(place).contiguous().numpy().tobytes() for place in places.tolist())
    return {
        "images": str(len(cache)),
        "labels": digest(cache.labels.numpy().tobytes())[:12],
        "pixels": digest(*pixels)[:12],
        "size of a batch": str(batches.batch_size),
        "seed of the order": str(batches.seed),
    }


# What torchrun gives to processes, so that they find each other.
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def join_ranks(
    *, device: str = "auto", sync_norms: bool = False, compress: bool = False, timeout: float = 1800.0
) -> Iterator["Ranks | None"]:
    """Join the other processes that torchrun started; None where this one is alone.

    `sync_norms` takes the statistics of batch norms over all processes. `compress` sends gradients
    in 16 bits. A process that waits for another longer than `timeout` seconds gives up.
    """
    started = int(os.environ.get("WORLD_SIZE", "1")) > 1 and all(name in os.environ for name in _NAMES)
    if not started:
        if sync_norms or compress:
            raise TrainingError(
                "only one process is there; --sync-norms and --compress-gradients are for several: "
                "torchrun --nproc-per-node=N -m polymask learn …"
            )
        yield None
        return
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    place = torch.device("cpu")
    if choose_device(device).type == "cuda":
        if local >= (count := torch.cuda.device_count()):
            raise TrainingError(f"process {local} here has no GPU: there are {count}; start as many processes as GPUs")
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    backend = "gloo" if place.type == "cpu" else "nccl"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (dist.DistError, RuntimeError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TrainingError(
            f"the {world} processes do not find each other at {where} ({error}); start them all, "
            "and let torchrun's --rdzv-endpoint name a port that all can reach"
        ) from error
    try:
        ranks = Ranks(place, backend, sync_norms=sync_norms, compress=compress)
        with ignore_sigterm_once_lost(ranks):
            yield ranks
    finally:
        # What still holds the group would end it later, with Python's lock, which its threads may be waiting for.
        gc.collect()
        dist.destroy_process_group()


class Ranks:
    """All processes of a training, seen from one of them."""

    def __init__(self, device: torch.device, backend: str, *, sync_norms: bool = False, compress: bool = False) -> None:
        self.device, self.backend = device, backend
        self.sync_norms, self.compress = sync_norms, compress
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.lost = False  # one of them is gone
        self.bytes_sent: dict[str, int] = {}  # given to collectives, by what they were for
        present = int(self.sum(torch.ones(1))[0])
        if present != self.world or str(self.world) != os.environ["WORLD_SIZE"]:
            raise TrainingError(
                f"{present} of {os.environ['WORLD_SIZE']} processes are there; start them by "
                "torchrun, all with the same --nnodes and --nproc-per-node"
            )

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and talks."""
        return self.rank == 0

    @property
    def title(self) -> str:
        """The processes in a line of progress."""
        norms = "batch norms over all of them" if self.sync_norms else "batch norms in each"
        bits = ", gradients in 16 bits" if self.compress else ""
        return f"{self.world} processes ({self.backend}), {norms}{bits}"

    def session(self, train: Batches, val: Batches | None, run: Run, stop: "Stop") -> "SharedSession":
        """A training that all processes do together; raise unless they are about to do the same."""
        from polymask.train.ranked_steps import SharedSession

        smallest, needed = getattr(train, "batch_size", 2 * self.world), 2 * self.world
        if smallest < needed:
            few = f"batches of {smallest} images give {self.world} processes fewer than two each"
            raise TrainingError(f"{few}; give --batch-size {needed} or more")
        facts = {name: json.dumps(value) for name, value in run.identity.items()}
        facts |= {f"{name} (training)": value for name, value in describe(train).items()}
        facts |= {f"{name} (validation)": value for name, value in describe(val).items()}
        facts["the checkpoint to go on from"] = str([run.stage, run.epoch, run.step])
        facts["versions"] = f"polymask {__version__}, torch {torch.__version__}"
        self.check_same(facts)
        return SharedSession(self, Shard(train, self.rank, self.world), run.identity["seed"], stop)

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Raise, in all processes alike, unless all have the same facts."""
        everyone = [json.loads(text) for text in self._gather_text(json.dumps(dict(facts)))]
        for rank, theirs in enumerate(everyone):
            for name in {**everyone[0], **theirs}:
                first, other = everyone[0].get(name, ""), theirs.get(name, "")
                if first != other:
                    here, there = _apart(first, other)
                    raise TrainingError(
                        f"the processes do not agree on {name}: rank 0 has {here}, rank {rank} "
                        f"has {there}; give all of them the same data, options and files"
                    )

    def evaluate(self, base: "Base", domain: "Domain", batches: Batches) -> float:
        """What `polymask.evaluate` gives; every process looks at its piece."""
        shard, counts = Shard(batches, self.rank, self.world), list[bool]()

        def pieces() -> Iterator[tuple[Tensor, Tensor]]:
            for images, labels in shard.batches():
                counts.extend([shard.counted > 0] * len(labels))
                yield images, labels

        found = outputs(network(base, domain), pieces(), base.placed, domain.target)
        mine = [each[torch.tensor(counts)] for each in found]  # over all ranks every image once
        return domain.target.measure(*(torch.cat(self._gather_rows(each)).cpu() for each in mine))

    def evaluate_in_detail(self, base: "Base", domain: "Domain", batches: Batches, hardest: int = 12) -> Evaluation:
        """The same as one process would find; every process looks at its piece."""
        shard = Shard(batches, self.rank, self.world)
        part = examine(base, domain, shard.counted_batches(), hardest)
        found = [json.loads(text) for text in self._gather_text(json.dumps([part.to_json(), shard.places]))]
        return joined([Evaluation.from_json(values) for values, _ in found], [places for _, places in found])

    def sum(self, tensor: Tensor, purpose: str = "counts") -> Tensor:
        """The sum of a small tensor over all processes."""
        return self.sum_(tensor.to(self.device, copy=True), purpose)

    def sum_(self, tensor: Tensor, purpose: str = "norms") -> Tensor:
        """The same, in place of a tensor on the device."""
        self.note(tensor, purpose)
        with losses_explained(self):
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor, purpose: str = "norms") -> list[Tensor]:
        """A tensor of every process, all of one shape."""
        self.note(tensor, purpose)
        found = [torch.empty_like(tensor) for _ in range(self.world)]
        with losses_explained(self):
            dist.all_gather(found, tensor)
        return found

    @torch.no_grad()
    def settle(self, domain: "Domain", best: float | None) -> float | None:
        """Let all processes have the head, the size of images and the result on val of the first one.

        Each has found its own after training, and on another machine a choice on val may end otherwise.
        """
        mine = [domain.input.side, domain.input.crop, math.nan if best is None else best]
        theirs = self.gather(torch.tensor(mine, dtype=torch.float64, device=self.device), "facts")
        side, crop, value = theirs[0].tolist()
        if (side, crop) != (domain.input.side, domain.input.crop):
            domain.input = replace(domain.input.at(int(side)), crop=crop)
        for parameter in () if domain.head is None else domain.head.parameters():
            parameter.copy_(self.gather(parameter.contiguous(), "head")[0])
        return None if math.isnan(value) else value

    def note(self, tensor: Tensor, purpose: str) -> None:
        """Count the bytes that go to the other processes."""
        size = tensor.numel() * tensor.element_size()
        self.bytes_sent[purpose] = self.bytes_sent.get(purpose, 0) + size

    def _gather_rows(self, rows: Tensor, purpose: str = "counts") -> list[Tensor]:
        """A tensor of every process; they may differ in length."""
        rows = rows.to(self.device)
        lengths = [int(length) for length in self.gather(torch.tensor([len(rows)], device=self.device), purpose)]
        padded = rows.new_zeros(max(lengths), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = self.gather(padded, purpose)
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]

    def _gather_text(self, text: str) -> list[str]:
        parts = self._gather_rows(torch.tensor(list(text.encode()), dtype=torch.uint8), "facts")
        return [bytes(part.tolist()).decode() for part in parts]


@contextmanager
def ignore_sigterm_once_lost(ranks: Ranks) -> Iterator[None]:
    """Once another process is lost, SIGTERM does nothing, also afterwards.

    torchrun sends it at once to those that are left, which have yet to say why they end. They end
    by themselves; if not, torchrun kills them.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        if not ranks.lost:
            signal.signal(number, before)
            signal.raise_signal(number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if not ranks.lost:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def losses_explained(ranks: Ranks) -> Iterator[None]:
    """Turn what torch says where a process is gone into a `LostProcess`."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if not isinstance(error, dist.DistError) and not re.search("gloo|nccl", said, re.I):
            raise
        ranks.lost = True
        raise LostProcess(
            f"rank {ranks.rank} of {ranks.world} lost another process of the training "
            f"({said.partition('] ')[2][:80] or said[:80]})"
        ) from error


def _apart(one: str, other: str) -> tuple[str, str]:
    """Two texts around the place where they begin to differ."""
    pairs = enumerate(zip(one, other, strict=False))
    same = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
    start = max(0, same - 20)

    def piece(text: str) -> str:
        return f"{'…' if start else ''}{text[start : start + 60]}{'…' if len(text) > start + 60 else ''}"

    return piece(one), piece(other)
