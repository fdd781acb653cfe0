"""One domain in several processes: the same as in one, and clear when it cannot be."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import polymask as pm
from nets import block_base
from polymask.checkpoint import load_checkpoint
from polymask.data import Loader, cache_domain, eval_transform, load_data, train_transform
from polymask.distributed import join_ranks
from polymask.distributed.ranks import Ranks
from polymask.distributed.session import combine_statistics
from polymask.distributed.shards import Shard, describe
from polymask.distributed.sync_norms import SyncNorms
from train_in_ranks import Noisy

TESTS = Path(__file__).parent
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
    first, second = ranks.run(
        lambda r: run([x, other][r], 1.0 - r, SyncNorms(ranks, Counted(6 * (1 - r))))
    )
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


def torchrun(*words, ranks=2, module=False, cwd=TESTS):
    """Run a script, or polymask, in several ranks; what it printed, and how it ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", *(["-m"] if module else []), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500
    )


def alone(*words):
    command = [sys.executable, "train_in_ranks.py", *map(str, words)]
    subprocess.run(command, cwd=TESTS, check=True, capture_output=True, timeout=300)


def largest_difference(one: Path, other: Path) -> float:
    states = [load_checkpoint(folder / "checkpoint") for folder in (one, other)]
    assert states[0]["place"] == states[1]["place"]
    pairs = [(states[0]["domain"][n], states[1]["domain"][n]) for n in states[0]["domain"]]
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["affine-full", "finetune"])
def test_two_ranks_learn_what_one_process_learns(method, tmp_path):
    alone(tmp_path / "one", "--method", method)
    run = torchrun("train_in_ranks.py", tmp_path / "two", "--method", method, "--sync-norms")
    assert run.returncode == 0, run.stderr
    assert largest_difference(tmp_path / "one", tmp_path / "two") < 1e-5
    found = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("one", "two")]
    for mine, theirs in zip(*(one["history"] for one in found), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


@pytest.mark.slow
def test_three_ranks_learn_what_one_process_learns_where_norms_are_the_bases(tmp_path):
    alone(tmp_path / "one", "--norms", "affine")
    run = torchrun("train_in_ranks.py", tmp_path / "three", "--norms", "affine", ranks=3)
    assert run.returncode == 0, run.stderr
    assert largest_difference(tmp_path / "one", tmp_path / "three") < 1e-5


@pytest.mark.slow
def test_gradients_in_16_bits_take_half_the_bytes_and_learn_nearly_the_same(tmp_path):
    sent = {}
    for name, options in (("full", []), ("half", ["--compress"])):
        run = torchrun("train_in_ranks.py", tmp_path / name, "--method", "finetune", *options)
        assert run.returncode == 0, run.stderr
        sent[name] = json.loads((tmp_path / name / "result.json").read_text())
    assert sent["half"]["bytes"]["gradients"] * 2 == sent["full"]["bytes"]["gradients"]
    losses = [[epoch[0] for epoch in sent[name]["history"]] for name in sent]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_and_it_goes_on_to_the_same_bits(victim, tmp_path):
    options = ["--sync-norms", "--net", "tiny"]  # with dropout
    whole = torchrun("train_in_ranks.py", tmp_path / "whole", *options)
    assert whole.returncode == 0, whole.stderr
    cut = torchrun("train_in_ranks.py", tmp_path / "cut", *options, "--die", victim, 13)
    assert cut.returncode != 0
    assert re.search(r"lost another process.* and saved .*checkpoint; go on with", cut.stderr)
    assert load_checkpoint(tmp_path / "cut" / "checkpoint")["place"][:2] == [1, 3]
    again = torchrun("train_in_ranks.py", tmp_path / "cut", *options, "--resume")
    assert again.returncode == 0, again.stderr
    assert largest_difference(tmp_path / "whole", tmp_path / "cut") == 0


@pytest.mark.slow
def test_ranks_with_other_data_do_not_begin(tmp_path):
    run = torchrun("train_in_ranks.py", tmp_path / "x", "--other", 1)
    assert run.returncode != 0
    assert "do not agree on first batch (training): rank 0 has" in run.stderr
    assert not (tmp_path / "x" / "checkpoint").exists()


@pytest.mark.slow
def test_learn_under_torchrun_is_one_command_with_one_voice(tmp_path):
    words = ["polymask", "learn", "digits", "--data", "digits", "--side", "32", "--limit", "60"]
    words += ["--epochs", "2", "--norms", "own", "--sync-norms", "--json"]
    run = torchrun(*words, module=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert 0 <= result["test_accuracy"] <= 100
    assert run.stderr.count("2 processes (gloo), batch norms over all of them") == 1
    assert run.stderr.count("epoch  1/2") == 1
    assert (tmp_path / "library" / "digits.safetensors").exists()
    assert {f.name for f in (tmp_path / "library" / "digits.run").iterdir()} == {"log.jsonl"}


@pytest.mark.slow
def test_a_stop_signal_to_one_rank_stops_all_at_the_same_step(tmp_path):
    run = torchrun("train_in_ranks.py", tmp_path, "--steps", 3000, "--stop", 1, 5)
    assert run.returncode != 0
    assert "training was asked to stop and saved" in run.stderr
    assert load_checkpoint(tmp_path / "checkpoint")["place"][:2] == [0, 6]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "package"),
    [("accelerate_loop", "accelerate"), ("fabric_loop", "lightning_fabric")],
)
def test_a_domain_learns_in_the_loops_of_others(example, package, tmp_path):
    pytest.importorskip(package, reason=f"the example needs {package}")
    script = TESTS.parent / "examples" / f"{example}.py"
    pack = tmp_path / "digits.safetensors"
    run = torchrun(script, "--steps", 20, "--images", 100, "--out", pack, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    first, last = re.search(r"2 processes, 20 steps: loss (\S+) -> (\S+)", run.stdout).groups()
    assert float(last) < float(first)
    assert pm.inspect(pack).manifest.method == "affine-full"
