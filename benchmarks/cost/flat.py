"""All sites of a domain in one flat buffer, under torch.compile: a way that was not taken.

Sites are padded to blocks of 1024 weights; each block has its site's scalars. One call a step each
way. But the buffer of W~ is one fresh piece of memory as large as the network, and the gradients of
the sites, which come one by one, have to be copied together.
"""

import torch
from torch import Tensor

BLOCK = 1024


class FlatMasks:
    """Weights and scores of all sites, a row for each block, and the scalars of each site."""

    def __init__(self, weights: list[Tensor], scores: list[Tensor], scalars: Tensor) -> None:
        blocks = [-(-w.numel() // BLOCK) for w in weights]
        self.site = torch.repeat_interleave(torch.arange(len(weights)), torch.tensor(blocks))
        self.sizes = [w.numel() for w in weights]
        self.starts = [BLOCK * sum(blocks[:i]) for i in range(len(blocks))]
        self.W, self.R = self._together(weights), self._together(scores)
        self.G, self.scalars = torch.zeros_like(self.W), scalars
        self.gradients = self.pieces(self.G)
        self.forward_kernel = torch.compile(_forward)
        self.backward_kernel = torch.compile(_backward)

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """The part of each site, one-dimensional."""
        whole = flat.view(-1)
        return [whole[a : a + n] for a, n in zip(self.starts, self.sizes, strict=True)]

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """W~ of every site; from the gradients of those, that of the scores and of the scalars."""
        made = self.pieces(self.forward_kernel(self.W, self.R, self.scalars, self.site))
        torch._foreach_copy_(self.gradients, gradients)
        dR, sums = self.backward_kernel(self.G, self.W, self.R, self.scalars, self.site)
        return made, self.pieces(dR), torch.zeros_like(self.scalars).index_add_(0, self.site, sums)

    def _together(self, tensors: list[Tensor]) -> Tensor:
        flat = torch.zeros(len(self.site), BLOCK)
        for piece, tensor in zip(self.pieces(flat), tensors, strict=True):
            piece.copy_(tensor.reshape(-1))
        return flat


def _forward(W: Tensor, R: Tensor, scalars: Tensor, site: Tensor) -> Tensor:
    k0, k1, k2, k3 = scalars[site].unsqueeze(2).unbind(1)
    return torch.where(R >= 0, W * (k0 + k3) + (k1 + k2), W * k0 + k1)


def _backward(
    G: Tensor, W: Tensor, R: Tensor, scalars: Tensor, site: Tensor
) -> tuple[Tensor, Tensor]:
    _, _, k2, k3 = scalars[site].unsqueeze(2).unbind(1)
    GW, mask = G * W, (R >= 0).to(G.dtype)
    sums = torch.stack([part.sum(1) for part in (GW, G, G * mask, GW * mask)], 1)
    return GW * k3 + G * k2, sums
