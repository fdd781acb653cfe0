"""Merged networks kept within a budget of bytes."""

import threading

import pytest
import torch

from nets import batch, logits, tiny_base, trained
from polymask.merged_cache import MergedCache
from polymask.predict import network
from polymask.surgery import named_tensors

PLENTY = 1 << 30


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def domains(base):
    return {f"d{i}": trained(base, seed=i).frozen() for i in range(4)}


def cost(base, domain, **options):
    cache = MergedCache(base, PLENTY, **options)
    cache.network("x", domain)
    return cache.stats.bytes


def test_a_warm_network_gives_the_domain_its_own_logits(base, domains):
    cache = MergedCache(base, PLENTY)
    for _ in range(2):
        for name, domain in domains.items():
            with torch.no_grad():
                found = cache.network(name, domain)(batch()[0])
            torch.testing.assert_close(found, logits(base, domain))
    assert (cache.stats.hits, cache.stats.misses) == (4, 4)


def test_an_entry_costs_the_bytes_that_are_not_the_bases(base, domains):
    merged = network(base, domains["d0"])
    theirs = {t.data_ptr() for _, t in named_tensors(base.net)}
    own = sum(
        t.numel() * t.element_size() for _, t in named_tensors(merged) if t.data_ptr() not in theirs
    )
    everything = sum(t.numel() * t.element_size() for _, t in named_tensors(merged))
    assert cost(base, domains["d0"]) == own < everything


def test_a_domain_that_changes_only_the_head_costs_only_the_head(base):
    head = trained(base, "classifier-only")
    assert cost(base, head) == sum(p.numel() * 4 for p in head.head.parameters())


def test_the_least_recently_used_network_goes_first(base, domains):
    cache = MergedCache(base, 3 * cost(base, domains["d0"]))
    for name in ("d0", "d1", "d2", "d0", "d3"):
        cache.network(name, domains[name])
    assert cache.names() == ["d2", "d0", "d3"]
    assert cache.stats.evictions == 1
    assert cache.stats.bytes == cache.budget_bytes


def test_a_network_beyond_the_budget_is_served_but_not_kept(base, domains):
    cache = MergedCache(base, 1)
    assert cache.network("d0", domains["d0"])(batch()[0]).shape == (8, 3)
    assert cache.names() == []
    assert cache.stats.bytes == 0


def test_a_cold_domain_is_loaded_by_its_function_and_a_warm_one_is_not(base, domains):
    loads = []

    def load():
        loads.append(1)
        return domains["d0"]

    cache = MergedCache(base, PLENTY)
    assert cache.network("d0", load) is cache.network("d0", load)
    assert len(loads) == 1


def test_threads_that_ask_for_one_cold_domain_merge_it_once(base, domains):
    cache, started, release, loads = MergedCache(base, PLENTY), [], threading.Event(), []

    def load():
        loads.append(1)
        assert release.wait(20)
        return domains["d0"]

    found = []
    threads = [
        threading.Thread(target=lambda: found.append(cache.network("d0", load))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
        started.append(thread)
    release.set()
    for thread in threads:
        thread.join(20)
    assert len(loads) == 1
    assert len(found) == 6
    assert len({id(net) for net in found}) == 1


def test_a_failed_load_reaches_the_caller_and_leaves_nothing(base, domains):
    def fail():
        raise ValueError("damaged")

    cache = MergedCache(base, PLENTY)
    with pytest.raises(ValueError, match="damaged"):
        cache.network("d0", fail)
    assert cache.names() == []
    cache.network("d0", domains["d0"])
    assert cache.names() == ["d0"]


def test_a_network_dropped_while_it_is_merged_is_not_kept(base, domains):
    cache = MergedCache(base, PLENTY)

    def load_and_drop():
        cache.drop("d0")
        return domains["d0"]

    cache.network("d0", load_and_drop)
    assert cache.names() == []
    assert cache.stats.bytes == 0


def test_dropping_gives_the_bytes_back(base, domains):
    cache = MergedCache(base, PLENTY)
    cache.network("d0", domains["d0"])
    cache.drop("d0")
    cache.drop("never there")
    assert (cache.names(), cache.stats.bytes) == ([], 0)


def test_a_domain_that_cannot_be_merged_runs_under_the_lock_of_the_base():
    from nets import block_base

    base, lock = block_base(), threading.Lock()
    domain = trained(base, "spottune").frozen()
    cache = MergedCache(base, PLENTY, lock=lock)
    run = cache.network("x", domain)
    images, done = batch()[0], threading.Event()
    with lock:
        thread = threading.Thread(target=lambda: (run(images), done.set()))
        thread.start()
        assert not done.wait(0.2)
    thread.join(20)
    assert done.is_set()
    torch.testing.assert_close(run(images), logits(base, domain))
    assert cache.stats.bytes > 0
