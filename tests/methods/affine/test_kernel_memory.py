"""What fused kernels move in memory stays what it is, and memory is used again when it is free."""

import copy
import gc

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import polymask as pm
from nets import batch, logits, tiny_base, tiny_net, train, trained
from polymask.core.merge import ReusedMemory, WorkingNetwork, reused_memory
from polymask.train.state import load_checkpoint, save_checkpoint
from short_training import fresh


def test_parameters_in_one_buffer_are_saved_and_loaded_one_by_one(fused, tmp_path, storages):
    fused()
    base = tiny_base()
    domain = trained(base)
    assert len(storages(domain)) == 1
    state = dict(domain.state_dict())
    save_checkpoint(tmp_path / "checkpoint.safetensors", state)
    safetensors.torch.save_file(state, tmp_path / "plain.safetensors")
    for found in (
        load_checkpoint(tmp_path / "checkpoint.safetensors"),
        safetensors.torch.load_file(tmp_path / "plain.safetensors"),
    ):
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    other = fresh(base)
    other.weights(base)  # moves it
    other.load_state_dict(state)
    assert len(storages(other)) == 1
    assert torch.equal(logits(base, other.eval()), logits(base, domain))
    domain.save(tmp_path / "pack.safetensors")
    loaded = pm.load_domain(tmp_path / "pack.safetensors", base)
    assert torch.equal(logits(base, loaded), logits(base, domain))
    merged = domain.merged(base).state_dict()
    safetensors.torch.save_file(merged, tmp_path / "merged.safetensors")


def test_a_deep_copy_and_the_stored_form_do_not_change_with_the_original(fused, storages):
    fused()
    base = tiny_base()
    domain = trained(base)
    copied, frozen, expected = copy.deepcopy(domain), domain.frozen(), logits(base, domain)
    with torch.no_grad():
        for parameter in domain.parameters():
            parameter.add_(1.0)
    assert not torch.equal(logits(base, domain), expected)
    assert torch.equal(logits(base, copied), expected)
    assert torch.equal(logits(base, frozen), expected)
    assert storages(copied).isdisjoint(storages(domain))


def test_a_moved_domain_is_gathered_again(fused, storages):
    fused()
    base = tiny_base()
    domain = trained(base)
    expected = logits(base, domain)
    domain.double().float()
    assert len(storages(domain)) == len(base.sites)
    assert torch.equal(logits(base, domain), expected)
    assert len(storages(domain)) == 1


def test_networks_that_share_the_bases_memory_keep_theirs_when_it_is_moved(fused):
    net = tiny_net().eval()
    base = pm.load_base(net, name="tiny", input=tiny_base().input)
    other = trained(base, "classifier-only").merged(base)
    shared = other.get_parameter("stem.weight")
    address, expected = shared.data_ptr(), other(batch()[0])
    fused()
    domain = trained(base)
    assert base.tensor("stem.weight").data_ptr() != address
    assert other.get_parameter("stem.weight") is shared
    assert shared.data_ptr() == address == net.stem.weight.data_ptr()
    assert torch.equal(other(batch()[0]), expected)
    assert torch.equal(domain.merged(base)(batch()[0]), logits(base, domain))
    base.verify()


def test_a_base_used_in_inference_mode_can_still_be_learned_on(fused):
    fused()
    base = tiny_base()
    frozen, learning = trained(base).frozen(), fresh(base)
    fresh_base = tiny_base()
    with torch.inference_mode():
        frozen(fresh_base, batch()[0])
        learning(fresh_base, batch()[0])
    assert train(fresh_base, learning)


@pytest.mark.parametrize("methods", [("affine-full", "affine-simple"), ("piggyback", "bn-only")])
def test_a_working_network_goes_through_fused_domains_and_others(fused, methods):
    base = tiny_base()
    domains = [trained(base, method).frozen() for method in methods]
    images = batch()[0]
    fused()
    working = WorkingNetwork(base)
    with torch.no_grad():
        for domain in (*domains, *domains):
            found = working.switch(domain)(images)
            assert torch.equal(found, domain.merged(base)(images))


@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
def test_a_mixed_batch_has_each_domains_own_logits(fused, cache_bytes):
    base = tiny_base()
    domains = {f"d{i}": trained(base, seed=i) for i in range(3)}
    images = batch(6)[0]
    names = ["d2", "d0", "d1", "d0", "d2", "d2"]
    expected = [domains[n](base, images[i : i + 1])[0] for i, n in enumerate(names)]
    fused()
    model = pm.MultiDomainModel(base, cache_bytes=cache_bytes)
    for name, domain in domains.items():
        model.add(name, domain)
    torch.testing.assert_close(model(images, domain=names), expected, rtol=0, atol=1e-6)
    model.verify()


def test_memory_is_lent_again_only_when_nobody_holds_it():
    memory = ReusedMemory()
    first = memory.take((2, 3))
    address, view = first.data_ptr(), first.view(-1)[1:]
    del first
    assert not memory.is_free
    assert memory.take((2, 3)).data_ptr() != address
    del view
    assert memory.is_free
    assert memory.take((2, 3)).data_ptr() == address
    assert memory.take((4, 3)).shape == (4, 3)


def test_weights_and_then_gradients_of_a_step_are_made_in_memory_that_is_used_again(fused):
    fused()
    base = tiny_base()
    domain = fresh(base)
    model, (images, labels) = pm.DomainModel(base, domain).train(), batch()
    first = next(t for _, t in domain.named_transforms())
    memory = reused_memory(first)
    places = set()
    for _ in range(3):
        loss = F.cross_entropy(model(images), labels)
        assert not memory.is_free
        loss.backward()
        places.add(first.scores.grad.untyped_storage().data_ptr())
        del loss
        model.zero_grad()
        assert memory.is_free
    assert len(places) == 1
    domain.restore(domain.stored())
    assert reused_memory(first) is not memory


def test_gradients_add_up_over_several_passes(fused):
    base, sums = tiny_base(), []
    for _ in range(2):
        domain = fresh(base)
        model = pm.DomainModel(base, domain).eval()
        losses = [F.cross_entropy(model(x), y) for x, y in (batch(seed=0), batch(seed=1))]
        for loss in losses:  # two graphs were alive at once
            loss.backward()
        F.cross_entropy(model(batch(seed=2)[0]), batch(seed=2)[1]).backward()
        sums.append([p.grad.clone() for p in domain.transforms.parameters()])
        fused()
    for eager, quick in zip(*sums, strict=True):
        torch.testing.assert_close(quick, eager, rtol=1e-4, atol=1e-6)


def test_parameters_in_one_buffer_are_trained_by_several_processes_too(fused, tmp_path):
    base, found, shared = tiny_base(), [], None
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        for _ in range(2):
            domain = fresh(base)
            model = pm.DomainModel(base, domain).eval()
            shared = DistributedDataParallel(model, gradient_as_bucket_view=True)
            optimiser = torch.optim.Adam(model.parameters(), 1e-2, fused=True)
            for images, labels in (batch(seed=0), batch(seed=1)):
                optimiser.zero_grad()
                F.cross_entropy(shared(images), labels).backward()
                optimiser.step()
            found.append(logits(base, domain))
            fused()
    finally:
        del (
            shared
        )  # if it were the last to hold the group, that would end with Python's lock, which its threads wait for
        gc.collect()
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-3)
