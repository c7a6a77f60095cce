"""The averaged network against a written-out average."""

import torch
from torch import nn

from ccssl.training.ema import Ema, copy_weights, tensors


def test_the_average_is_the_recursion_written_out():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    ema = Ema(network, decay=0.5)
    expected = [tensor.clone() for tensor in tensors(network)]
    for step in range(6):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn_like(parameter))
        network(torch.randn(5, 3, dtype=torch.float64))
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        for old, new in zip(expected, tensors(network), strict=True):
            old.copy_(decay * old + (1 - decay) * new if new.is_floating_point() else new)
    for found, wanted in zip(tensors(ema.network), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)
    assert not any(parameter.requires_grad for parameter in ema.network.parameters())
    assert not ema.network.training


def test_long_averages_end_at_the_decay_that_was_asked_for():
    network = nn.Linear(1, 1, bias=False).double()
    ema = Ema(network, decay=0.999)
    with torch.no_grad():
        network.weight.add_(1)
        before = ema.network.weight.clone()
        ema.update(10**6)
    torch.testing.assert_close(ema.network.weight - before, torch.full((1, 1), 1e-3, dtype=torch.float64))


def test_copies_are_equal_and_apart():
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    copy_weights(source, target)
    assert torch.equal(source.weight, target.weight)
    with torch.no_grad():
        source.weight.zero_()
    assert target.weight.abs().sum() > 0
