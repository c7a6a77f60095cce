"""What ranks agree on: alone, and with another process."""

import pytest
import torch
from ranks import on_ranks

from ccssl import collective


def test_alone_tensors_pass_through():
    tensor = torch.randn(3, 2)
    assert (collective.rank(), collective.world()) == (0, 1)
    for function in (collective.mean, collective.gather, collective.broadcast):
        assert function(tensor) is tensor


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match=r"mean over ranks needs a floating-point tensor, got torch\.int64"):
        collective.mean(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="gather joins along the first dimension, got a single number"):
        collective.gather(torch.tensor(1.0))


def share():
    """What each rank brings and gets."""
    rank = collective.rank()
    row = torch.arange(6.0).reshape(2, 3) * 10**rank
    strided = row.T  # not contiguous
    kept = strided.clone()
    results = {
        "who": [rank, collective.world()],
        "mean": collective.mean(strided),
        "mean64": collective.mean(torch.full((2,), 0.1 * (rank + 1), dtype=torch.float64)),
        "mean of a number": collective.mean(torch.tensor(float(rank))),
        "gather": collective.gather(strided),
        "gather int": collective.gather(torch.tensor([rank, 10 + rank])),
        "gather bool": collective.gather(torch.tensor([rank == 1, True])),
        "ragged": collective.gather(torch.full((1 + 2 * rank, 2), rank), ragged=True),
        "ragged empty": collective.gather(torch.arange(3 * rank), ragged=True),
        "broadcast": collective.broadcast(strided),
        "broadcast from 1": collective.broadcast(torch.tensor([rank]), source=1),
    }
    assert torch.equal(strided, kept), "what is given stays as it was"
    return results


def test_two_ranks(tmp_path):
    first, second = on_ranks(share, tmp_path)
    assert (first.pop("who"), second.pop("who")) == ([0, 2], [1, 2])
    one = torch.arange(6.0).reshape(2, 3).T
    expected = {
        "mean": one * 5.5,
        "mean64": torch.full((2,), 0.15, dtype=torch.float64),
        "mean of a number": torch.tensor(0.5),
        "gather": torch.cat([one, one * 10]),
        "gather int": torch.tensor([0, 10, 1, 11]),
        "gather bool": torch.tensor([False, True, True, True]),
        "ragged": torch.tensor([[0, 0], [1, 1], [1, 1], [1, 1]]),
        "ragged empty": torch.arange(3),
        "broadcast": one,
        "broadcast from 1": torch.tensor([1]),
    }
    assert first.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, msg=lambda said, name=name: f"{name}: {said}")
        assert torch.equal(first[name], second[name]), name
