r"""The exponential moving average of a network: the model that is reported.

After each step the average a follows the weights w::

    a  <-  d a + (1 - d) w,        d = min(decay, (1 + t) / (10 + t))   at step t = 0, 1, ...

With decay .999 the average reaches a thousand steps back. The ramp (t + 1) / (t + 10) lets it forget the initial
weights, which would otherwise still make up a third of it after a thousand steps; from step 9,000 on it is without
effect, so that long runs are those of a fixed decay. ``ramp=False`` keeps the decay fixed throughout, to the letter of
the paper.

Floating-point buffers (the statistics of batch norm) are averaged with the weights they belong to; others are copied.
"""

# torch offers operations on lists of tensors under these names only.
# pyright: reportPrivateImportUsage=false

import copy

import torch
from torch import Tensor, nn


class Ema:
    """The running average of a network, itself a network in evaluation mode."""

    def __init__(self, network: nn.Module, decay: float, ramp: bool = True) -> None:
        self.network = copy.deepcopy(network).eval().requires_grad_(False)
        self.decay, self.ramp = decay, ramp
        average, source = tensors(self.network), tensors(network)
        floating = [n for n, tensor in enumerate(source) if tensor.is_floating_point()]
        self._average = [average[n] for n in floating]
        self._source = [source[n] for n in floating]
        rest = sorted(set(range(len(source))) - set(floating))
        self._copied = [(average[n], source[n]) for n in rest]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Let the average follow the weights after step ``step``."""
        decay = min(self.decay, (1 + step) / (10 + step)) if self.ramp else self.decay
        torch._foreach_lerp_(self._average, self._source, 1 - decay)
        for average, source in self._copied:
            average.copy_(source)


def tensors(network: nn.Module) -> list[Tensor]:
    """Return parameters and buffers, in an order that copies of the network share."""
    return [*network.parameters(), *network.buffers()]


def have_finite_norm(tensors: list[Tensor]) -> Tensor:
    """Return for each tensor whether its norm is finite: its numbers are, and so are their squares."""
    return torch.stack([norm.isfinite() for norm in torch._foreach_norm(tensors)])


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Make ``target`` a copy of ``source`` in place, without a look from the host."""
    torch._foreach_copy_(tensors(target), tensors(source))
