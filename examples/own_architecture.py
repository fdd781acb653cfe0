""".venv/bin/python examples/own_architecture.py: domains on your own network.

polymask needs to know nothing about a network: it runs it once and sees which parameters enter a convolution
or a linear map. This one reads a digit as a signal of 64 numbers, with 1-D, grouped and transposed
convolutions, a linear layer, and a matrix that belongs to no layer. It first learns the digits 0 to 4; 5 to 9
then become a domain on it, at one bit per weight, and 0 to 4 work as before.
"""

import tempfile

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import polymask as pm

EPOCHS, BATCH = 12, 32


class SignalNet(nn.Module):
    """A signal (1, 64) to logits, with every kind of weight that can be masked."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, 32, 5, stride=2, padding=2)
        self.norm = nn.BatchNorm1d(32)
        self.grouped = nn.Conv1d(32, 64, 3, stride=2, padding=1, groups=4)
        self.up = nn.ConvTranspose1d(64, 64, 4, stride=2, padding=1)
        self.hidden = nn.Linear(64 * 32, 64)
        self.mixing = nn.Parameter(torch.randn(64, 64) / 8)  # not the weight of a module
        self.classify = nn.Linear(64, classes)

    def forward(self, signals: Tensor) -> Tensor:
        """(N, 1, 64) to (N, classes)."""
        x = F.relu(self.norm(self.enter(signals)))
        x = F.relu(self.up(F.relu(self.grouped(x))))
        x = F.relu(self.hidden(x.flatten(1)))
        return self.classify(x + F.relu(F.linear(x, self.mixing)))


def train(model: nn.Module, signals: Tensor, labels: Tensor, rate: float) -> None:
    """The same loop for the whole network and for a domain: it trains what requires a gradient."""
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    model.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(signals)).split(BATCH):
            loss = F.cross_entropy(model(signals[rows]), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, signals: Tensor, labels: Tensor) -> float:
    """The share of signals that a model classifies correctly."""
    return (model(signals).argmax(1) == labels).float().mean().item()


def main() -> None:
    """Pretrain, learn a domain, save and load it, and show that nothing was forgotten."""
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    signals = torch.tensor(pixels, dtype=torch.float32)[:, None] / 16
    digits = torch.tensor(digits)
    is_test = torch.arange(len(digits)) % 5 == 0
    low = digits < 5
    known = [(signals[rows], digits[rows]) for rows in (low & ~is_test, low & is_test)]
    new = [(signals[rows], digits[rows] - 5) for rows in (~low & ~is_test, ~low & is_test)]

    net = SignalNet(classes=5)
    train(net, *known[0], rate=1e-3)
    before = net(known[1][0])
    print(f"the network: {accuracy(net, *known[1]):.0%} of the test digits 0 to 4")

    spec = pm.InputSpec(shape=(1, 64), mean=(0.0,), std=(1.0,))
    base = pm.load_base(net, name="signal-net", input=spec)
    for name, site in base.sites.items():
        print(f"  {name}: {site.kind}, {site.numel} weights")
    assert set(base.sites) >= {"enter.weight", "up.weight", "hidden.weight", "mixing"}

    domain = pm.new_domain(base, "affine-full", ["5", "6", "7", "8", "9"])
    model = pm.DomainModel(base, domain)
    train(model, *new[0], rate=3e-3)
    learned = accuracy(model, *new[1])
    print(f"a domain on it: {learned:.0%} of the test digits 5 to 9")
    assert learned > 0.8

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        domain.save(f"{folder}/high.safetensors")
        again = pm.load_domain(f"{folder}/high.safetensors", base)
        assert torch.equal(again(base, new[1][0]), model(new[1][0]))
        assert torch.equal(net(known[1][0]), before)
    base.verify()
    print("the pack gives the same logits; the network's own are what they were, to the bit")


if __name__ == "__main__":
    main()
