"""One thread: the networks are small, and results must not depend on the machine.

Nor on how busy it is: Hypothesis gives an example no deadline, and does not fail for slow data. Servers that tests
start compile nothing.
"""

import os

import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("POLYMASK_KERNELS", "eager")
torch.set_num_threads(1)
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
