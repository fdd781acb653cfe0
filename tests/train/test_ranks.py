"""One domain in several processes: its parts, with threads in place of processes."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import polymask as pm
from nets import block_base
from polymask.data.cache import cache_domain
from polymask.data.load import load_data
from polymask.data.loader import Loader
from polymask.data.preprocess import eval_transform, train_transform
from polymask.train.ranked_steps import SyncNorms, combine_statistics
from polymask.train.ranks import Ranks, Shard, describe, ignore_sigterm_once_lost, join_ranks
from train_in_ranks import Noisy

SPEC = pm.InputSpec((3, 16, 16))


class InThreads:
    """Ranks that are threads of this process."""

    def __init__(self, world: int) -> None:
        self.world, self.barrier = world, threading.Barrier(world, timeout=30)
        self.here = threading.local()
        self.given = [None] * world

    def gather(self, tensor, purpose=""):
        self.given[self.here.rank] = tensor.clone()
        self.barrier.wait()
        found = [part.clone() for part in self.given]
        self.barrier.wait()
        return found

    def sum_(self, tensor, purpose=""):
        return tensor.copy_(torch.stack(self.gather(tensor)).sum(0))

    def run(self, work):
        """What `work(rank)` gives in every rank."""
        found = [None] * self.world

        def start(rank):
            self.here.rank = rank
            found[rank] = work(rank)

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


class Counted:
    def __init__(self, counted: int) -> None:
        self.counted = counted


@pytest.fixture(scope="module")
def loader():
    data = load_data("digits", limit=51)
    caches = cache_domain(data, SPEC)
    return Loader(caches.train, train_transform(data, SPEC), batch_size=12, seed=3, shuffle=True)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_pieces_of_all_ranks_are_the_batches_of_one_process(loader, world):
    shards = [Shard(loader, rank, world) for rank in range(world)]
    pieces = zip(*(shard.batches(1, 2) for shard in shards), strict=True)
    for (images, labels), parts in zip(loader.batches(1, 2), pieces, strict=True):
        if len(labels) < 2 * world:
            assert all(torch.equal(part[0], images) for part in parts)
            assert [shard.counted for shard in shards] == [len(labels)] + [0] * (world - 1)
        else:
            assert torch.equal(torch.cat([part[0] for part in parts]), images)
            assert torch.equal(torch.cat([part[1] for part in parts]), labels)
            assert [shard.counted for shard in shards] == [len(part[1]) for part in parts]
    assert sum(loader.sizes()) == len(loader.cache)


def test_every_image_is_counted_once_when_ranks_measure():
    data = load_data("digits", limit=51)
    test = Loader(cache_domain(data, SPEC).val, eval_transform(data, SPEC), batch_size=7)
    for whole in (test, Noisy(3, 7, 2)):
        expected = [label for _, labels in whole.batches() for label in labels.tolist()]
        found = []
        for rank in range(3):
            for _, labels in Shard(whole, rank, 3).counted_batches():
                found += labels.tolist()
        assert sorted(found) == sorted(expected)


def test_data_is_described_by_what_training_would_see(loader):
    same = Loader(loader.cache, loader.transform, batch_size=12, seed=3, shuffle=True)
    assert describe(same) == describe(loader)
    other = Loader(loader.cache, loader.transform, batch_size=12, seed=4, shuffle=True)
    assert describe(other) != describe(loader)
    assert describe(Noisy(2, 4, 4)) != describe(Noisy(2, 4, 4, offset=1))
    assert describe(None) == {"images": "none"}


@pytest.mark.parametrize("shape", [(10, 4), (10, 4, 3, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_over_all_ranks_is_the_norm_of_the_whole_batch(shape, affine):
    torch.manual_seed(0)
    x = 3 + torch.randn(shape, dtype=torch.float32)
    w, b = (torch.randn(4), torch.randn(4)) if affine else (None, None)
    weigh = torch.randn(shape)

    def run(x, weigh, mode=None):
        tensors = [x.clone().requires_grad_()]
        tensors += [t.clone().requires_grad_() for t in (w, b) if t is not None]
        mean, var = torch.full((4,), 0.5), torch.full((4,), 2.0)
        with mode or torch.enable_grad():
            given = tensors[1:] or (None, None)
            y = F.batch_norm(tensors[0], mean, var, *given, training=True, momentum=0.3)
        (y * weigh).sum().backward()
        return [y.detach(), *(t.grad for t in tensors), mean, var]

    whole = run(x, weigh)
    ranks, cuts = InThreads(3), (slice(0, 4), slice(4, 9), slice(9, 10))
    parts = ranks.run(lambda r: run(x[cuts[r]], weigh[cuts[r]], SyncNorms(ranks, Counted(1))))
    for i in (0, 1):  # outputs, and gradients of the inputs
        assert torch.allclose(torch.cat([part[i] for part in parts]), whole[i], atol=1e-5)
    for i in range(2, len(whole) - 2):  # gradients of scale and shift are summed with all others
        assert torch.allclose(sum(part[i] for part in parts), whole[i], atol=1e-4)
    for part in parts:
        assert torch.allclose(part[-2], whole[-2], atol=1e-6)
        assert torch.allclose(part[-1], whole[-1], atol=1e-5)


def test_images_that_do_not_count_change_nothing_in_the_norms_of_others():
    torch.manual_seed(0)
    x, other = torch.randn(6, 2, 3, 3), torch.randn(6, 2, 3, 3)

    def run(images, weight, mode=None):
        images = images.clone().requires_grad_()
        mean, var = torch.zeros(2), torch.ones(2)
        with mode or torch.enable_grad():
            y = F.batch_norm(images, mean, var, training=True)
        (weight * y.square().sum() * y[0].sum()).backward()
        return images.grad, mean, var

    alone = run(x, 1.0)
    ranks = InThreads(2)
    first, second = ranks.run(lambda r: run([x, other][r], 1.0 - r, SyncNorms(ranks, Counted(6 * (1 - r)))))
    for mine, expected in zip(first, alone, strict=True):
        assert torch.allclose(mine, expected, atol=1e-5)
    assert torch.equal(second[0], torch.zeros_like(second[0]))
    assert torch.equal(second[1], first[1])


def test_one_value_a_channel_in_all_ranks_is_refused():
    ranks = InThreads(1)

    def run(rank):
        with SyncNorms(ranks, Counted(1)), pytest.raises(pm.TrainingError, match="larger images"):
            F.batch_norm(torch.randn(1, 2, 1, 1), None, None, training=True)

    ranks.run(run)


def test_statistics_of_ranks_become_those_of_all_they_have_seen():
    ranks, base = InThreads(2), block_base()
    domains = [pm.new_domain(base, "affine-full", ["a", "b"], norms="own") for _ in range(2)]
    for domain, mean, var in zip(domains, (1.0, 3.0), (4.0, 6.0), strict=True):
        for _, norm in domain.named_norms():
            norm.running_mean.fill_(mean)
            norm.running_var.fill_(var)
    ranks.run(lambda rank: combine_statistics(domains[rank], ranks))
    for domain in domains:
        for _, norm in domain.named_norms():
            assert torch.all(norm.running_mean == 2.0)
            assert torch.all(norm.running_var == 6.0)  # (4 + 6) / 2 within, 1 between


def test_a_process_that_is_alone_has_no_ranks(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_ranks() as ranks:
        assert ranks is None
    with pytest.raises(pm.TrainingError, match="torchrun"), join_ranks(sync_norms=True):
        pass


def test_ranks_that_differ_are_told_where():
    class Says(Ranks):
        def __init__(self):
            pass

        def _gather_text(self, text):
            return [text, json.dumps({"classes": "owl, hare", "images": "12"})]

    with pytest.raises(pm.TrainingError, match=r"classes: rank 0 has owl, fox, rank 1 .* owl, ha"):
        Says().check_same({"classes": "owl, fox", "images": "12"})


def test_a_verb_that_is_not_for_torchrun_says_so():
    run = subprocess.run(
        [sys.executable, "-m", "polymask", "methods"],
        env=os.environ | {"RANK": "1", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1
    assert "polymask (rank 1): torchrun is for learn" in run.stderr


def test_who_has_lost_another_process_has_time_to_say_so():
    """torchrun asks those that are left to end while they still save and write their message."""
    asked, ranks = [], SimpleNamespace(lost=False)
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    ours = signal.getsignal(signal.SIGTERM)
    try:
        with ignore_sigterm_once_lost(ranks):
            os.kill(os.getpid(), signal.SIGTERM)  # nobody is lost: as ever
        assert (asked, signal.getsignal(signal.SIGTERM)) == ([signal.SIGTERM], ours)
        with ignore_sigterm_once_lost(ranks):
            ranks.lost = True
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_is_settled_after_training_is_that_of_the_first_rank():
    base, ranks = block_base(), InThreads(2)
    ranks.device = torch.device("cpu")
    domains = [pm.new_domain(base, "bn-only", ["a", "b"]) for _ in range(2)]
    domains[1].input = dataclasses.replace(domains[0].input.at(24), crop=1.0)
    heads = [domain.head.weight.detach().clone() for domain in domains]
    assert not torch.equal(*heads)
    found = ranks.run(lambda rank: Ranks.settle(ranks, domains[rank], 70.0 + rank))
    assert found == [70.0, 70.0]
    assert domains[1].input == domains[0].input
    assert all(torch.equal(domain.head.weight, heads[0]) for domain in domains)
