"""What learning masks costs in memory over fine-tuning, on a real network."""

import os
import subprocess
import sys

import pytest

# Peak resident memory of a few steps of Adam, in a process of its own. "finetune" is the plain way:
# the network's own parameters; "masks" is a domain on the frozen network.
STEPS = """
import resource, sys, torch, torch.nn.functional as F
import polymask as pm
from polymask.nets.zoo import build
torch.set_num_threads(1)
torch.manual_seed(0)
net, spec = build("torchvision:resnet50", pretrained=False)
spec = pm.InputSpec((3, 64, 64))
images, labels = torch.randn(2, 3, 64, 64), torch.tensor([0, 1])
if sys.argv[1] == "finetune":
    net.fc = torch.nn.Linear(2048, 10)
    model = net.train()
else:
    base = pm.load_base(net, input=spec)
    domain = pm.new_domain(base, "affine-full", [str(i) for i in range(10)])
    model = pm.DomainModel(base, domain).train()
    del net
learned = [p for p in model.parameters() if p.requires_grad]
optimiser = torch.optim.Adam(learned, 1e-4, fused=True)
for _ in range(3):
    optimiser.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimiser.step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_masks_cost_at_most_nine_bytes_per_weight_more_than_fine_tuning():
    def peak(way: str) -> int:
        # Large blocks are mapped and unmapped one by one, so that the peak is that of what is in
        # use and not of what the C library keeps for later.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        run = subprocess.run(
            [sys.executable, "-c", STEPS, way],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        )
        return int(run.stdout)

    # Interleaved, and the least of three.
    runs = [(peak("masks"), peak("finetune")) for _ in range(3)]
    masks, finetune = (min(column) for column in zip(*runs, strict=True))
    assert (masks - finetune) / 23_454_912 <= 9
