"""Checkpoints: all that a run needs to go on bit for bit, written so that a crash never leaves half of one.

A checkpoint is two files in a folder::

    step-00001024.safetensors     every tensor
    state.json                    the step, the name of the tensor file, and everything that is no tensor

The tensor file is written first, under its own name; ``state.json`` then replaces its predecessor in one atomic
rename, and the predecessor's tensors are removed. Whatever happens in between, ``state.json`` names a file that is
complete. No pickle is read or written.

A tensor that several names share, such as a weight tied to another, is written once; ``state.json`` says which names
are the same. Tensors that merely overlap are written each.
"""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ccssl.errors import InputError

STATE = "state.json"


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint in place of the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-{step:08d}.safetensors"
    on_host, same = _once(tensors)
    write(folder / name, lambda path: save_file(on_host, path))
    text = json.dumps({"step": step, "tensors": name, "same": same, **state}, allow_nan=False)
    write_text(folder / STATE, text)
    for old in folder.glob("step-*.safetensors"):
        if old.name != name:
            old.unlink()


def _once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors on the host that share no memory, and for each name left out the name of the same tensor."""
    on_host: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    seen: dict[Any, str] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.numel():
            what = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if seen.setdefault(what, name) != name:
                same[name] = seen[what]
                continue
        host = tensor.detach().cpu().contiguous()
        if host.untyped_storage().data_ptr() in taken:
            host = host.clone()  # safetensors refuses what overlaps
        taken.add(host.untyped_storage().data_ptr())
        on_host[name] = host
    return on_host, same


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return tensors and state of the checkpoint in a folder, or None where there is none yet."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        tensors = load_tensors(folder / state["tensors"])
        return tensors | {name: tensors[first] for name, first in state.get("same", {}).items()}, state
    except InputError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is not a checkpoint ({error}): remove {folder} to start anew, or restore it from a copy."
        ) from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file; say which file it is if it cannot be read."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read ({error}): restore it from a copy, or start anew.") from None


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write(path: Path, fill: Callable[[Path], object]) -> None:
    """Replace a file atomically: ``fill`` writes a temporary one beside it, which then takes its name.

    Who may read it is what the user's umask says, however it is filled: safetensors would keep it to its owner.
    """
    temporary = path.with_name(f".{path.name}.partial")
    with told_if_full(path):
        try:
            temporary.unlink(missing_ok=True)  # a crash may have left one
            temporary.touch()
            mode = temporary.stat().st_mode
            fill(temporary)
            temporary.chmod(mode)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def told_if_full(path: Path) -> Iterator[None]:
    """Say what to do where the disk has no room for what is being written to ``path``."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        if number not in (errno.ENOSPC, errno.EDQUOT) and "No space left" not in str(error):
            raise
        raise InputError(
            f"the disk of {path.parent} is full: {path.name} was not written, the last checkpoint is kept. "
            "Make room and go on with --resume."
        ) from None


def seed_random(seed: int) -> None:
    """Seed the global random generators, which a network of the user's may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - as above
    random.seed(seed)


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of the global random generators, which a network of the user's may draw from."""
    tensors = {"random.torch": torch.get_rng_state()}
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        tensors[f"random.cuda.{index}"] = torch.cuda.get_rng_state(index)
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - its state is to be kept
    tensors["random.numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, internal, gauss_next = random.getstate()
    tensors["random.python"] = torch.tensor(internal)
    state = {"numpy": [name, position, has_gauss, gauss], "python": [version, gauss_next]}
    return tensors, {"random": state}


def set_random_state(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Put the global random generators back to where they were."""
    torch.set_rng_state(tensors["random.torch"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        if f"random.cuda.{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"random.cuda.{index}"], index)
    name, position, has_gauss, gauss = state["random"]["numpy"]
    keys = tensors["random.numpy"].numpy().astype(np.uint32)
    np.random.set_state((name, keys, position, has_gauss, gauss))  # noqa: NPY002
    version, gauss_next = state["random"]["python"]
    random.setstate((version, tuple(tensors["random.python"].tolist()), gauss_next))
