"""Fine-tuned networks under the base's names: every usual file is read, every misfit is named."""

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import polymask as pm
from nets import SPEC, batch, tiny_base, tiny_net
from polymask.conversion.finetuned import ConvertError, Finetuned


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def tuned_net():
    """The base's network with another head, and every parameter moved."""
    net = tiny_net()
    torch.manual_seed(1)
    net.fc = nn.Linear(12, 3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return net.eval()


@pytest.fixture(scope="module")
def state(tuned_net):
    return {name: tensor.detach().clone() for name, tensor in tuned_net.state_dict().items()}


def same(a, b):
    assert a.tensors.keys() == b.tensors.keys()
    pairs = [(a.weight, b.weight), (a.bias, b.bias)]
    pairs += [(tensor, b.tensors[name]) for name, tensor in a.tensors.items()]
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {f"module.{name}": t for name, t in state.items()},
        lambda state: {f"_orig_mod.{name}": t for name, t in state.items()},
        lambda state: {f"module.model.{name}": t for name, t in state.items()},
        lambda state: {"state_dict": {f"model.{n}": t for n, t in state.items()}, "epoch": 3},
        lambda state: {"epoch": 3, "model": state, "optimizer": {"lr": 0.1}},
        lambda state: {n: t for n, t in state.items() if "num_batches" not in n},
    ],
    ids=["plain", "parallel", "compiled", "twice", "lightning", "script", "without counters"],
)
def test_any_usual_way_of_saving_gives_the_same_tensors(base, state, wrap, tmp_path):
    expected = Finetuned.read(base, state)
    wrapped = wrap(state)
    torch.save(wrapped, tmp_path / "tuned.pth")
    assert same(Finetuned.read(base, wrapped), expected)
    assert same(Finetuned.read(base, tmp_path / "tuned.pth"), expected)
    if all(isinstance(t, torch.Tensor) for t in wrapped.values()):
        save_file(wrapped, tmp_path / "tuned.safetensors")
        assert same(Finetuned.read(base, str(tmp_path / "tuned.safetensors")), expected)


def test_every_tensor_that_does_not_fit_is_named_in_one_error(base, state, tmp_path):
    broken = {n: t.clone() for n, t in state.items() if n not in ("hidden.bias", "fc.weight")}
    broken["stem.weight"] = torch.zeros(8, 3, 5, 5)
    broken["fc.1.weight"] = torch.zeros(3, 12)
    broken["plain.weight"][0] = math.nan
    save_file(broken, tmp_path / "other.safetensors")
    with pytest.raises(ConvertError) as caught:
        Finetuned.read(base, tmp_path / "other.safetensors")
    message = str(caught.value)
    assert "other.safetensors does not fit base tiny" in message
    assert "it lacks hidden.bias, fc.weight" in message
    assert "it has unknown fc.1.weight" in message
    assert "stem.weight ((8, 3, 5, 5), not (8, 3, 3, 3))" in message
    assert "not finite are plain.weight" in message


def test_a_head_of_another_width_and_a_value_that_is_no_tensor_are_named(base, state):
    with pytest.raises(ConvertError, match=r"fc.weight \(\(3, 99\), not \(3, 12\)\)"):
        Finetuned.read(base, state | {"fc.weight": torch.zeros(3, 99)})
    with pytest.raises(ConvertError, match=r"stem.weight \(int, not \(8, 3, 3, 3\)\)"):
        Finetuned.read(base, state | {"stem.weight": 3})


def test_a_classifier_without_a_bias_gets_one_of_zeros(base, state):
    without = {name: tensor for name, tensor in state.items() if name != "fc.bias"}
    assert Finetuned.read(base, without).bias.tolist() == [0, 0, 0]


def test_code_in_a_checkpoint_is_refused_and_does_not_run(base, tuned_net, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    for name, content in (("evil", {"model": Evil()}), ("module", tuned_net)):
        torch.save(content, tmp_path / f"{name}.pth")
        with pytest.raises(pm.BaseError, match=f"{name}.pth holds objects .* could run foreign"):
            Finetuned.read(base, tmp_path / f"{name}.pth")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"nonsense", "holds something else beside tensors"), (b"PK\3\4zip", "cannot be read as a")],
)
def test_a_file_that_is_no_checkpoint_is_explained(base, tmp_path, content, message):
    (tmp_path / "x.pth").write_bytes(content)
    with pytest.raises(pm.PolymaskError, match=f"x.pth {message}"):
        Finetuned.read(base, tmp_path / "x.pth")
    torch.save([1, 2], tmp_path / "y.pth")
    with pytest.raises(pm.BaseError, match=r"y.pth holds a list, not a state dict"):
        Finetuned.read(base, tmp_path / "y.pth")
    with pytest.raises(pm.BaseError, match="no weights at"):
        Finetuned.read(base, tmp_path / "nothing.pth")


def test_a_base_without_a_linear_classifier_is_refused(state):
    base = pm.load_base(tiny_net(), name="headless", input=SPEC, classifier=None)
    with pytest.raises(ConvertError, match="base headless has no linear classifier"):
        Finetuned.read(base, state)


def test_half_precision_checkpoints_are_widened(base, state):
    halves = {name: t.half() if t.is_floating_point() else t for name, t in state.items()}
    tuned = Finetuned.read(base, halves)
    assert {t.dtype for t in (*tuned.tensors.values(), tuned.weight)} == {torch.float32}
    assert torch.equal(tuned.weight, state["fc.weight"].half().float())


def test_the_teacher_is_the_checkpoints_network_to_the_bit(base, state, tuned_net):
    teacher = Finetuned.read(base, state).network(base)
    with torch.no_grad():
        assert torch.equal(teacher(batch()[0]), tuned_net(batch()[0]))


def test_tied_weights_may_come_under_either_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.fc = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.fc(self.b(self.a(x)))

    spec = pm.InputSpec((6,), (0.5,) * 6, (0.5,) * 6)
    base = pm.load_base(Tied(), name="tied", input=spec)
    state = {name: tensor + 0.1 for name, tensor in Tied().state_dict().items()}
    for lacking, given in (("a.weight", "b.weight"), ("b.weight", "a.weight")):
        less = {name: tensor for name, tensor in state.items() if name != lacking}
        assert torch.equal(Finetuned.read(base, less).tensors["a.weight"], state[given])
