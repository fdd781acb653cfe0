"""Merged networks kept within a budget of bytes."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nets import batch, logits, tiny_base, trained
from polymask.core.merge import BLOCK
from polymask.core.network import named_tensors
from polymask.library.cache import MergedCache
from polymask.train.predict import network

PLENTY = 1 << 30


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def domains(base):
    return {f"d{i}": trained(base, seed=i).frozen() for i in range(4)}


def cost(base, domain, **options):
    cache = MergedCache(base, PLENTY, **options)
    touch(cache, "x", domain)
    return cache.stats.bytes


def touch(cache, name, domain):
    with cache.use(name, domain):
        pass


@torch.no_grad()
def said(cache, name, domain):
    with cache.use(name, domain) as net:
        return net(batch()[0])


def test_a_warm_network_gives_the_domain_its_own_logits(base, domains):
    cache = MergedCache(base, PLENTY)
    for _ in range(2):
        for name, domain in domains.items():
            torch.testing.assert_close(said(cache, name, domain), logits(base, domain))
    assert (cache.stats.hits, cache.stats.misses) == (4, 4)


def test_an_entry_costs_the_bytes_that_are_not_the_bases(base, domains):
    merged = network(base, domains["d0"])
    theirs = {t.data_ptr() for _, t in named_tensors(base.net)}
    own = sum(t.numel() * t.element_size() for _, t in named_tensors(merged) if t.data_ptr() not in theirs)
    padding = len(base.sites) * BLOCK * 4  # each weight begins with a block of its own
    assert own <= cost(base, domains["d0"]) < own + padding


def test_a_domain_that_changes_only_the_head_costs_only_the_head(base):
    head = trained(base, "classifier-only")
    assert cost(base, head) == sum(p.numel() * 4 for p in head.head.parameters())


def test_the_least_recently_used_network_goes_first(base, domains):
    cache = MergedCache(base, 3 * cost(base, domains["d0"]))
    for name in ("d0", "d1", "d2", "d0", "d3"):
        touch(cache, name, domains[name])
    assert cache.names() == ["d2", "d0", "d3"]
    assert cache.stats.evictions == 1
    assert cache.stats.bytes == cache.budget_bytes


def test_a_network_beyond_the_budget_is_served_but_not_kept(base, domains):
    cache = MergedCache(base, 1)
    assert said(cache, "d0", domains["d0"]).shape == (8, 3)
    assert cache.names() == []
    assert cache.stats.bytes == 0


def test_a_cold_domain_is_loaded_by_its_function_and_a_warm_one_is_not(base, domains):
    loads = []

    def load():
        loads.append(1)
        return domains["d0"]

    cache = MergedCache(base, PLENTY)
    with cache.use("d0", load) as first, cache.use("d0", load) as second:
        assert first is second
    assert len(loads) == 1


def test_threads_that_ask_for_one_cold_domain_merge_it_once(base, domains):
    cache, started, release, loads = MergedCache(base, PLENTY), [], threading.Event(), []

    def load():
        loads.append(1)
        assert release.wait(20)
        return domains["d0"]

    found = []

    def ask():
        with cache.use("d0", load) as net:
            found.append(net)

    threads = [threading.Thread(target=ask) for _ in range(6)]
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
        touch(cache, "d0", fail)
    assert cache.names() == []
    touch(cache, "d0", domains["d0"])
    assert cache.names() == ["d0"]


def test_a_network_dropped_while_it_is_merged_is_not_kept(base, domains):
    cache = MergedCache(base, PLENTY)

    def load_and_drop():
        cache.drop("d0")
        return domains["d0"]

    touch(cache, "d0", load_and_drop)
    assert cache.names() == []
    assert cache.stats.bytes == 0


def test_dropping_gives_the_bytes_back(base, domains):
    cache = MergedCache(base, PLENTY)
    touch(cache, "d0", domains["d0"])
    cache.drop("d0")
    cache.drop("never there")
    assert (cache.names(), cache.stats.bytes) == ([], 0)


def places(net):
    return {tensor.data_ptr() for tensor in net.parameters() if tensor.ndim > 1}


def test_where_the_cache_is_full_a_new_network_has_the_memory_of_the_one_that_goes(base, domains):
    cache = MergedCache(base, 2 * cost(base, domains["d0"]))
    with cache.use("d0", domains["d0"]) as net:
        memory = places(net)
    touch(cache, "d1", domains["d1"])
    with cache.use("d2", domains["d2"]) as net:
        assert len(memory & places(net)) == len(base.sites)
    assert cache.names() == ["d1", "d2"]
    assert cache.stats.evictions == 1
    for name in ("d2", "d1", "d0"):
        torch.testing.assert_close(said(cache, name, domains[name]), logits(base, domains[name]))


class Meeting:
    """A lock that, once `together` is set, nobody gets before all of them want it."""

    together = threading.Barrier(1)

    def __init__(self):
        self.lock = threading.Lock()

    def __enter__(self):
        self.together.wait(timeout=60)
        self.lock.acquire()

    def __exit__(self, *error):
        self.lock.release()


def test_networks_that_are_merged_at_once_each_have_the_memory_of_one_that_goes(base, domains):
    lock = Meeting()
    cache = MergedCache(base, 2 * cost(base, domains["d0"]), lock=lock)
    memory = set()
    for name in ("d0", "d1"):
        with cache.use(name, domains[name]) as net:
            memory |= places(net)
    lock.together = threading.Barrier(2)

    def own(name):
        with cache.use(name, domains[name]) as net:
            return places(net)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(own, ("d2", "d3"))
    assert len(first & memory) == len(second & memory) == len(base.sites)
    assert cache.stats.evictions == 2


@torch.no_grad()
def test_a_network_in_use_is_not_written_to(base, domains):
    cache = MergedCache(base, cost(base, domains["d0"]))
    with cache.use("d0", domains["d0"]) as net:
        for name in ("d1", "d2", "d3"):
            torch.testing.assert_close(said(cache, name, domains[name]), logits(base, domains[name]))
        assert cache.names() == ["d3"]
        torch.testing.assert_close(net(batch()[0]), logits(base, domains["d0"]))


def test_domains_of_other_sites_get_memory_of_their_own(base, domains):
    head = trained(base, "classifier-only").frozen()
    cache = MergedCache(base, cost(base, domains["d0"]))
    with cache.use("d0", domains["d0"]) as net:
        large = weakref.ref(net)
    del net
    for name, domain in (("head", head), ("d1", domains["d1"])):
        torch.testing.assert_close(said(cache, name, domain), logits(base, domain))
        gc.collect()
        assert large() is None  # a head alone does not keep the memory of whole weights
    assert cache.stats.bytes <= cache.budget_bytes


@torch.no_grad()
def test_threads_that_push_each_other_out_get_their_own_domains_logits(base, domains):
    cache = MergedCache(base, 2 * cost(base, domains["d0"]))
    images = batch()[0]
    expected = {name: logits(base, domain) for name, domain in domains.items()}

    @torch.no_grad()
    def ask(seed):
        names = list(domains)
        for step in range(40):
            name = names[(seed * 7 + step * (seed + 1)) % len(names)]
            with cache.use(name, lambda name=name: domains[name]) as net:
                torch.testing.assert_close(net(images), expected[name])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(6)))
    assert cache.stats.evictions > 10
    assert cache.stats.bytes <= cache.budget_bytes


def test_a_domain_that_cannot_be_merged_runs_under_the_lock_of_the_base():
    from nets import block_base

    base, lock = block_base(), threading.Lock()
    domain = trained(base, "spottune").frozen()
    cache = MergedCache(base, PLENTY, lock=lock)
    touch(cache, "x", domain)
    done = threading.Event()
    with lock:
        thread = threading.Thread(target=lambda: (said(cache, "x", domain), done.set()))
        thread.start()
        assert not done.wait(0.2)
    thread.join(20)
    assert done.is_set()
    torch.testing.assert_close(said(cache, "x", domain), logits(base, domain))
    assert cache.stats.bytes > 0
