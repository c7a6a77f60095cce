"""Checkpoints come back as they were, and a write that fails leaves the one before."""

import errno
import json
import os
import random

import numpy as np
import pytest
import torch

from ccssl.errors import InputError
from ccssl.training import checkpoint


def test_tensors_and_state_come_back_bit_for_bit(tmp_path):
    tensors = {
        "a": torch.randn(3, 4).to(torch.bfloat16),
        "b": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "c": torch.tensor(7),
        "d": torch.empty(0, dtype=torch.int32),
    }
    checkpoint.save(tmp_path, 12, tensors, {"number": 0.1})
    found, state = checkpoint.load(tmp_path)
    assert state["step"] == 12
    assert state["number"] == 0.1
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) and found[key].dtype == tensors[key].dtype for key in tensors)


def test_there_is_none_before_the_first_and_one_after_the_second(tmp_path):
    assert checkpoint.load(tmp_path / "absent") is None
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"a": torch.tensor(step)}, {})
    assert checkpoint.load(tmp_path)[0]["a"] == 2
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["state.json", "step-00000002.safetensors"]


@pytest.mark.parametrize("fails", ["save_file", "replace"])
def test_a_full_disk_keeps_what_was_there(tmp_path, monkeypatch, fails):
    checkpoint.save(tmp_path, 1, {"a": torch.tensor(1)}, {})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((checkpoint, "save_file") if fails == "save_file" else (checkpoint.os, "replace")), full)
    with pytest.raises(InputError, match="is full"):
        checkpoint.save(tmp_path, 2, {"a": torch.tensor(2)}, {})
    monkeypatch.undo()
    assert checkpoint.load(tmp_path)[0]["a"] == 1
    assert not list(tmp_path.glob(".*"))


def test_shared_memory_is_written_once_and_comes_back(tmp_path):
    weight, empty = torch.arange(1000.0), torch.empty(0)
    tensors = {
        "a": weight,
        "tied": weight.view(1000),
        "part": weight[10:20],
        "other form": weight.view(10, 100),
        "e": empty,
        "f": empty,
    }
    checkpoint.save(tmp_path, 1, tensors, {})
    found, state = checkpoint.load(tmp_path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    assert state["same"] == {"tied": "a"}
    checkpoint.save(tmp_path / "alone", 1, {"a": weight}, {})
    sizes = [next(folder.glob("*.safetensors")).stat().st_size for folder in (tmp_path / "alone", tmp_path)]
    assert sizes[1] < 2.5 * sizes[0]  # a tensor for "a" and "tied", one for the other form


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_all_files_may_be_read_by_those_whom_the_umask_admits(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        checkpoint.save(tmp_path, 1, {"a": torch.zeros(3)}, {})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {mode}


@pytest.mark.parametrize("fault", ["cut tensors", "no tensors", "cut state", "foreign state"])
def test_damage_is_named(tmp_path, fault):
    checkpoint.save(tmp_path, 1, {"a": torch.zeros(100)}, {})
    tensors, state = tmp_path / "step-00000001.safetensors", tmp_path / "state.json"
    if fault == "cut tensors":
        tensors.write_bytes(tensors.read_bytes()[:50])
    elif fault == "no tensors":
        tensors.unlink()
    else:
        state.write_text(state.read_text()[:9] if fault == "cut state" else json.dumps({"other": 1}))
    with pytest.raises(InputError, match=r"safetensors|state\.json"):
        checkpoint.load(tmp_path)


def test_random_generators_go_on_where_they_were(tmp_path):
    def draws():
        return [
            torch.rand(2).tolist(),
            np.random.rand(2).tolist(),  # noqa: NPY002 - a user's network may draw from it
            np.random.randn(),  # noqa: NPY002
            random.random(),
            random.gauss(),
        ]

    random.gauss()
    np.random.randn()  # noqa: NPY002 - leaves a second number in store
    tensors, state = checkpoint.random_state()
    checkpoint.save(tmp_path, 1, tensors, state)
    expected = draws()
    checkpoint.set_random_state(*checkpoint.load(tmp_path))
    assert draws() == expected
