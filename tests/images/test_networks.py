"""The networks: the Wide ResNet against a second one written as equations, the small one within its budget."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ccssl.errors import InputError
from ccssl.images.networks import NETWORKS
from ccssl.images.wide_resnet import WideResNet

# A name, and the sizes of images that it is tested with.
SIZES = {"small": (8, 9, 20, 28, 32, 96), "wrn-28-2": (8, 28, 32), "wrn-28-8": (8,)}
over_networks = pytest.mark.parametrize("name", NETWORKS)


def build(name, classes=10, channels=3, size=32, seed=0):
    torch.manual_seed(seed)
    return NETWORKS[name](classes, channels, size)


def images(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def multiply_adds(network, image):
    """Count those of one image in all convolutions and linear layers."""
    count = 0

    def add(layer, _, out):
        nonlocal count
        count += out[0].numel() * layer.weight[0].numel()

    handles = [m.register_forward_hook(add) for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    network.eval()(image)
    for handle in handles:
        handle.remove()
    return count


def test_every_network_is_tested():
    assert SIZES.keys() == NETWORKS.keys(), "give the new network its sizes in SIZES"


@over_networks
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_of_any_size_become_finite_logits(name, channels):
    for size in SIZES[name]:
        network = build(name, classes=7, channels=channels, size=size)
        assert network(images(2, channels, size, size + 3)).shape == (2, 7)
        assert network(images(2, channels, size, size)).isfinite().all()


@over_networks
def test_every_parameter_learns(name):
    network = build(name, size=8)
    F.cross_entropy(network(images(4, 3, 8, 8)), torch.tensor([0, 1, 2, 3])).backward()
    # A layer that is built but passed over has no gradient.
    dead = [key for key, value in network.named_parameters() if value.grad is None or not value.grad.any()]
    assert dead == []


@over_networks
def test_seed_decides_and_state_can_be_moved(name):
    one, same, other = (build(name, size=8, seed=seed) for seed in (0, 0, 1))
    x = images(2, 3, 8, 8)
    assert torch.equal(one.eval()(x), same.eval()(x))
    assert not torch.equal(one(x), other.eval()(x))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x), other(x))


@over_networks
def test_images_do_not_influence_each_other_in_evaluation(name):
    network = build(name, size=8).double().eval()
    x = images(5, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(network(x)[2:3], network(x[2:3]), rtol=1e-12, atol=1e-12)


@over_networks
@pytest.mark.parametrize("train", [True, False])
def test_memory_format_and_precision_change_nothing_but_rounding(name, train):
    x = images(3, 3, 8, 8, dtype=torch.float64)
    network = build(name, size=8).double().train(train)
    expected = network(x)
    assert expected.dtype == torch.float64
    last = network.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected, rtol=1e-10, atol=1e-10)
    single = network.float()(x.float())
    torch.testing.assert_close(single, expected.float(), rtol=1e-2, atol=1e-3)


@over_networks
def test_under_autocast_logits_stay_close(name):
    network, x = build(name, size=8).eval(), images(3, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = network(x)
    torch.testing.assert_close(found.float(), network(x), rtol=0.1, atol=0.1)


# The Wide ResNet as equations over a dict of tensors, after the description in FixMatch's paper and code.


def norm(x, weights, prefix):
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
    scale, shift = (weights[f"{prefix}.{key}"].view(1, -1, 1, 1) for key in ("weight", "bias"))
    return (x - mean) / (variance + 0.001).sqrt() * scale + shift


def act(x):
    return torch.where(x > 0, x, 0.1 * x)


def equations(x, weights, units):
    y = F.conv2d(x, weights["stem.weight"], padding=1)
    for number in range(3 * units):
        prefix, first = f"units.{number}", number % units == 0
        stride = 2 if first and number else 1
        activated = act(norm(y, weights, f"{prefix}.norm1"))
        if number == 0:
            y = activated
        inner = F.conv2d(activated, weights[f"{prefix}.conv1.weight"], stride=stride, padding=1)
        inner = F.conv2d(act(norm(inner, weights, f"{prefix}.norm2")), weights[f"{prefix}.conv2.weight"], padding=1)
        if first:
            y = F.conv2d(y, weights[f"{prefix}.shortcut.weight"], stride=stride)
        y = y + inner
    y = act(norm(y, weights, "norm"))
    return y.flatten(2).mean(-1) @ weights["head.weight"].T + weights["head.bias"]


@pytest.mark.parametrize(("depth", "width"), [(10, 2), (28, 2), (16, 3)])
def test_wide_resnet_is_its_equations(depth, width):
    torch.manual_seed(1)
    network = WideResNet(5, 2, depth=depth, width=width).double()
    with torch.no_grad():
        for parameter in network.parameters():  # scales and shifts too, which start as 1 and 0
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = images(3, 2, 12, 8, dtype=torch.float64)
    expected = equations(x, dict(network.named_parameters()), (depth - 4) // 6)
    torch.testing.assert_close(network(x), expected, rtol=1e-9, atol=1e-9)


def count(width, classes, channels=3, units=4):
    """Parameters of the network, summed group by group."""
    total, before = 9 * channels * 16, 16
    for after in (16 * width, 32 * width, 64 * width):
        total += 9 * before * after + 9 * after**2 + before * after + 2 * before + 2 * after
        total += (units - 1) * (18 * after**2 + 4 * after)
        before = after
    return total + 2 * before + (before + 1) * classes


@pytest.mark.parametrize(
    ("name", "classes", "expected"), [("wrn-28-2", 10, 1_467_610), ("wrn-28-8", 100, 23_401_012)]
)
def test_wide_resnet_has_the_published_number_of_parameters(name, classes, expected):
    width = int(name.rsplit("-", maxsplit=1)[1])
    assert sum(parameter.numel() for parameter in build(name, classes).parameters()) == expected
    assert count(width, classes) == expected


def test_wide_resnet_starts_as_fixmatch_says():
    network = build("wrn-28-2").requires_grad_(False)
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 25
    assert {(module.eps, module.momentum) for module in norms} == {(1e-3, 0.001)}
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            assert module.bias is None
            kernel, outputs = module.kernel_size[0], module.out_channels
            spread = math.sqrt(2 / (kernel**2 * outputs))
            n = module.weight.numel()
            # The standard deviation of n draws scatters by 1 / sqrt(2 n); five of these.
            assert float(module.weight.std()) == pytest.approx(spread, rel=5 / math.sqrt(2 * n))
            assert float(module.weight.abs().max()) > 2.5 * spread, "normal, not uniform"
    assert float(network.head.weight.std()) == pytest.approx(math.sqrt(2 / (128 + 10)), rel=0.1)
    assert not network.head.bias.any()


def test_wide_resnet_keeps_resolution_in_the_first_group_and_halves_it_twice():
    network, sides = build("wrn-28-2"), []
    for unit in network.units:
        unit.register_forward_hook(lambda _, __, out: sides.append((out.shape[1], out.shape[-1])))
    network(images(2, 3, 32, 32))
    assert sides == [(32, 32)] * 4 + [(64, 16)] * 4 + [(128, 8)] * 4


def test_the_small_network_says_which_images_are_too_small():
    assert NETWORKS["small"](10, 1, 3)(torch.zeros(2, 1, 3, 3)).shape == (2, 10)
    with pytest.raises(InputError, match="takes images of 3 x 3 pixels or more, got a side of 2"):
        NETWORKS["small"](10, 1, 2)


def test_batch_norm_remembers_as_slowly_as_it_should():
    network, x = build("wrn-28-2"), images(8, 3, 16, 16) + 5
    network(x)
    statistics = network.units[0].norm1
    batch = network.stem(x).mean((0, 2, 3))
    torch.testing.assert_close(statistics.running_mean, 0.001 * batch, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("depth", [4, 12, 27])
def test_wide_resnet_of_impossible_depth(depth):
    with pytest.raises(InputError, match=rf"depth must be 10, 16, 22, .* got {depth}"):
        WideResNet(10, depth=depth)
