"""Several processes, one run: joining the group that ``python -m torch.distributed.run`` announces, and agreeing.

Tensors are exchanged by ``ccssl.collective``. Here is what the host decides: agreement goes over a group of its own on
the CPU, so that asking costs no look at the device.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ccssl import collective
from ccssl.errors import InputError

_control: Any = None


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Join the process group that the environment announces, if any, and leave it at the end."""
    global _control
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield
        return
    on_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_cuda:
        if local_rank() >= torch.cuda.device_count():
            raise InputError(
                f"process {local_rank()} has no device of its own, there are {torch.cuda.device_count()}: "
                "start no more processes than that, or give --device cpu."
            )
        torch.cuda.set_device(local_rank())
    dist.init_process_group("nccl" if on_cuda else "gloo")
    _control = dist.new_group(backend="gloo")
    try:
        yield
    finally:
        _control = None
        dist.destroy_process_group()


def local_rank() -> int:
    """Return the number of this process among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def parallel(network: nn.Module, device: torch.device) -> nn.Module:
    """Return a network whose backward pass averages gradients over ranks.

    Buffers are left alone in its forward pass: ``share_buffers`` gives them to all ranks after the step.
    """
    kind: Any = nn.parallel.DistributedDataParallel
    known = inspect.signature(kind).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # until torch 2.12
    on = [device.index] if device.type == "cuda" else None
    return kind(network, device_ids=on, **{buffers: False})


def agree(number: int) -> int:
    """Return the largest of all ranks' numbers: when one is asked to stop, all stop at the same step."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    told = torch.tensor(number)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=_control)
    return int(told)


def share_buffers(network: nn.Module) -> None:
    """Give all ranks the buffers of the first.

    In a forward pass the running statistics of batch norm move, on each rank by its own share of the batch. Whoever
    copies them, the average or a snapshot, must find the same ones everywhere.
    """
    if collective.world() == 1:
        return
    for dtype in dict.fromkeys(buffer.dtype for buffer in network.buffers()):  # in the same order everywhere
        buffers = [buffer for buffer in network.buffers() if buffer.dtype == dtype]
        told = collective.broadcast(torch.cat([buffer.flatten() for buffer in buffers]))
        for buffer, part in zip(buffers, told.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))


def wait() -> None:
    """Wait until all ranks are here."""
    if dist.is_initialized():
        dist.barrier(group=_control)
