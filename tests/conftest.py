"""One thread: the networks are small, and results must not depend on the machine."""

import torch

torch.set_num_threads(1)
