r"""Distribution alignment (Berthelot et al., 2020): on average, predict classes as often as they occur.

A model that learns from its own predictions tends to prefer some classes more and more. Let m be the mean
prediction over the last n batches and f the class frequencies of the labeled items. A prediction q is corrected
by ::

    aligned_k  =  q_k (f_k + e) / (m_k + e)  /  (the same summed over all classes),      e = 1e-6,

which raises the classes that were predicted too rarely. The memory begins full, with n uniform predictions, so that
m moves slowly at first. e keeps the ratio finite for a class that was never predicted, and leaves a class without
a labeled item a small chance.

A batch is aligned by the batches before it, then joins them; m is over the batches of all ranks.

D. Berthelot et al.: ReMixMatch: semi-supervised learning with distribution matching and augmentation anchoring.
ICLR 2020.

Shapes: B unlabeled items of a batch, K classes, n batches remembered.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ccssl import collective

_LEAST = 1e-6


class Alignment(nn.Module):
    """The mean prediction of the last ``memory`` batches, and the correction by it.

    >>> alignment = Alignment(torch.tensor([0.5, 0.5]), memory=1)
    >>> alignment.update(torch.tensor([[0.9, 0.1], [0.7, 0.3]]))
    >>> alignment(torch.tensor([[0.5, 0.5]]))
    tensor([[0.2000, 0.8000]])
    """

    history: Tensor  # (n, K) mean predictions, the oldest first
    frequencies: Tensor  # (K,) of the labeled items

    def __init__(self, frequencies: Tensor, memory: int) -> None:
        super().__init__()
        classes = len(frequencies)
        self.register_buffer("frequencies", frequencies.clone())
        self.register_buffer("history", torch.full((memory, classes), 1 / classes))

    @torch.no_grad()
    def forward(self, q_BK: Tensor) -> Tensor:
        """Return the aligned predictions (B, K); nothing is remembered."""
        ratio_K = (self.frequencies + _LEAST) / (self.history.mean(0) + _LEAST)
        raised_BK = q_BK * ratio_K
        return raised_BK / raised_BK.sum(-1, keepdim=True)

    @torch.no_grad()
    def update(self, q_BK: Tensor) -> None:
        """Remember the mean of a batch of predictions, as they were before alignment, and forget the oldest."""
        mean_K = collective.mean(q_BK.mean(0)).to(self.history)
        self.history.copy_(torch.cat([self.history[1:], mean_K[None]]))
