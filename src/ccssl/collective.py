r"""What several processes do together so that they train one model: tensors in, the same tensors out on each.

With R processes ("ranks") each holds its share of a batch. A statistic of the whole batch, such as the mean
prediction, must come out alike on all ranks, bit for bit, or the ranks drift apart: an all-reduce computes each
number once and hands it round, which guarantees it.

Every function here must be called by all ranks, in the same order. Without a process group (one process, the usual
case) there is nobody to talk to and tensors pass through unchanged, so that callers need no case of their own.
Nothing here reads from the device, but for ``gather`` with ``ragged=True``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    """Return the number of this process, 0 to ``world() - 1``; 0 without a process group."""
    return dist.get_rank() if _grouped() else 0


def world() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if _grouped() else 1


@torch.no_grad()
def mean(tensor: Tensor) -> Tensor:
    """Return the mean over ranks of a floating-point tensor that has the same shape everywhere.

    >>> mean(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    if not tensor.is_floating_point():
        raise ValueError(f"the mean over ranks needs a floating-point tensor, got {tensor.dtype}")
    if world() == 1:
        return tensor
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total / world()


@torch.no_grad()
def gather(tensor: Tensor, *, ragged: bool = False) -> Tensor:
    """Return the tensors of all ranks, one after the other in rank order, joined along the first dimension.

    All must have the same shape. With ``ragged=True`` the first dimension may differ, even be 0; the lengths must
    then be read from the device.

    >>> gather(torch.tensor([3, 1]))
    tensor([3, 1])
    """
    if tensor.ndim < 1:
        raise ValueError("gather joins along the first dimension, got a single number")
    if world() == 1:
        return tensor
    if not ragged:
        return torch.cat(_all_gather(tensor))
    lengths = torch.cat(_all_gather(torch.tensor([len(tensor)], device=tensor.device))).tolist()
    padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    return torch.cat([part[:length] for part, length in zip(_all_gather(padded), lengths, strict=True)])


@torch.no_grad()
def broadcast(tensor: Tensor, source: int = 0) -> Tensor:
    """Return the tensor of the rank ``source``; the others give one of the same shape and type.

    >>> broadcast(torch.tensor([3, 1]))
    tensor([3, 1])
    """
    if world() == 1:
        return tensor
    received = tensor.clone(memory_format=torch.contiguous_format)
    dist.broadcast(received, source)
    return received


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def _all_gather(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(world())]
    dist.all_gather(parts, tensor.contiguous())
    return parts
