"""Running a function on several processes that hear of each other (gloo, over the loopback)."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(function: Callable[[], Any], folder: Path, world: int = 2) -> list[Any]:
    """Return what ``function`` (of a module, picklable by name) returns on each rank: tensors, lists, dicts."""
    torch.multiprocessing.spawn(_work, (function, str(folder), world), nprocs=world)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _work(rank: int, function: Callable[[], Any], folder: str, world: int) -> None:
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host name need not resolve
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    try:
        torch.save(function(), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
