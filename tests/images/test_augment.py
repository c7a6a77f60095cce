"""Weak and strong views are PIL's, follow their law, and are made without looking at what lies on the device."""

import numpy as np
import pil_oracle as pil
import pytest
import torch
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from ccssl.images.augment import StrongDraw, WeakDraw, draw_strong, draw_weak, strong, weak
from ccssl.images.randaugment import SETTINGS

SIZES = [(32, 32, 3), (28, 28, 1), (8, 8, 1), (8, 8, 3), (17, 40, 3), (40, 17, 1), (96, 96, 3)]
FALSE_ALARM = 1e-8  # of one test; all of them together stay far below one in a million


def generator(seed):
    return torch.Generator().manual_seed(seed)


def pictures(n, height, width, channels):
    return torch.randint(256, (n, height, width, channels), dtype=torch.uint8, generator=generator(99))


def weak_by_pil(images, draw):
    rows = zip(images.numpy(), draw.flip.tolist(), draw.shift.tolist(), strict=True)
    return np.stack([pil.to_pixels(pil.weak(pil.to_pil(a), flip, *shift)) for a, flip, shift in rows])


def strong_by_pil(images, draw):
    views = [pil.to_pil(a) for a in weak_by_pil(images, draw.weak)]
    chains = [[SETTINGS[i] for i in row] for row in draw.operations.setting.tolist()]
    rows = zip(views, chains, draw.corner.tolist(), strict=True)
    return np.stack([pil.to_pixels(pil.cutout(pil.operate(view, chain), *corner)) for view, chain, corner in rows])


@pytest.mark.parametrize(("height", "width", "channels"), SIZES)
def test_a_weak_view_is_pils_for_every_flip_and_shift(height, width, channels):
    reach = [range(-(side // 8), side // 8 + 1) for side in (height, width)]
    every = [(flip, down, right) for flip in (False, True) for down in reach[0] for right in reach[1]]
    every = every[:: max(1, len(every) // 300)]
    flip, *shift = torch.tensor(every).unbind(1)
    draw = WeakDraw((height, width), flip.bool(), torch.stack(shift, 1))
    images = pictures(len(every), height, width, channels)
    assert np.array_equal(weak(images, draw).numpy(), weak_by_pil(images, draw))


@pytest.mark.parametrize(("height", "width", "channels"), SIZES)
def test_a_strong_view_is_pils(height, width, channels):
    images = pictures(150, height, width, channels)
    draw = draw_strong(150, height, width, True, generator(1))
    assert np.array_equal(strong(images, draw).numpy(), strong_by_pil(images, draw))


def test_images_in_any_layout_are_left_as_they_are():
    images = pictures(20, 16, 12, 3)
    kept = images.clone()
    draw = draw_strong(20, 16, 12, True, generator(2))
    expected = strong(images, draw)
    assert torch.equal(images, kept)
    turned = images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert torch.equal(strong(turned, draw), expected)
    assert torch.equal(weak(turned, draw.weak), weak(images, draw.weak))
    assert expected.is_contiguous()


@pytest.mark.parametrize("rows", [slice(3, 40), slice(1, None, 3), slice(0, 0), torch.tensor([5, 5, 0, 59])])
def test_rows_of_a_draw_are_the_draws_of_rows(rows):
    images = pictures(60, 9, 16, 3)
    weakly, strongly = draw_weak(60, 9, 16, True, generator(3)), draw_strong(60, 9, 16, True, generator(4))
    assert torch.equal(weak(images[rows], weakly[rows]), weak(images, weakly)[rows])
    assert torch.equal(strong(images[rows], strongly[rows]), strong(images, strongly)[rows])
    assert len(weakly[rows]) == len(strongly[rows]) == len(images[rows])


def test_an_image_does_not_depend_on_its_neighbours():
    images = pictures(60, 16, 9, 3)
    draw = draw_strong(60, 16, 9, True, generator(5))
    alone = [strong(images[i : i + 1], draw[i : i + 1]) for i in range(60)]
    assert torch.equal(strong(images, draw), torch.cat(alone))


def fields(draw):
    if isinstance(draw, WeakDraw):
        return [draw.flip, draw.shift]
    return [*fields(draw.weak), draw.operations.setting, draw.corner]


@pytest.mark.parametrize("make", [draw_weak, draw_strong])
def test_a_draw_is_the_generators_alone(make):
    state = torch.random.get_rng_state()
    first, again, other = (fields(make(50, 32, 32, True, generator(seed))) for seed in (6, 6, 7))
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert len(a) == 50
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("make", [draw_weak, draw_strong])
def test_nothing_is_flipped_where_a_mirrored_image_is_another(make):
    assert not fields(make(1_000, 32, 32, False, generator(8)))[0].any()
    assert fields(make(1_000, 32, 32, True, generator(8)))[0].any()


@pytest.mark.parametrize(("height", "width"), [(32, 32), (8, 8), (17, 40)])
def test_flips_and_shifts_are_drawn_uniformly(height, width):
    draws, (down, right) = 100_000, (height // 8, width // 8)
    draw = draw_weak(draws, height, width, True, generator(9))
    kinds = (2, 2 * down + 1, 2 * right + 1)
    parts = np.stack([draw.flip.numpy(), draw.shift[:, 0].numpy() + down, draw.shift[:, 1].numpy() + right])
    found = np.bincount(np.ravel_multi_index(tuple(parts.astype(int)), kinds), minlength=np.prod(kinds))
    assert stats.chisquare(found).pvalue > FALSE_ALARM


@pytest.mark.parametrize(("height", "width"), [(32, 32), (8, 8), (17, 40), (15, 15)])
def test_the_square_is_put_uniformly(height, width):
    """Its middle is uniform over the image, its upper left corner kept inside."""
    draws, half = 100_000, min(height, width) // 2 / 2
    corner = draw_strong(draws, height, width, True, generator(10)).corner.numpy()
    laws = []
    for side in (height, width):
        edges = np.arange(side + 1)
        laws.append(np.diff(np.where(edges > 0, np.minimum(edges + half, side), 0)) / side)
    found = np.bincount(corner[:, 0] * width + corner[:, 1], minlength=height * width)
    expected = np.outer(*laws).flatten()
    assert np.isclose(expected.sum(), 1)
    assert not found[expected == 0].any()
    assert stats.chisquare(found[expected > 0], draws * expected[expected > 0]).pvalue > FALSE_ALARM


def test_without_operations_a_grey_square_is_all_that_is_added():
    images = pictures(500, 32, 24, 3)
    draw = draw_strong(500, 32, 24, True, generator(11), operations=0)
    views, before = strong(images, draw), weak(images, draw.weak)
    for view, image, (top, left) in zip(views, before, draw.corner.tolist(), strict=True):
        square = (slice(top, top + 12), slice(left, left + 12))
        assert (view[square] == 127).all()
        image[square] = 127
    assert torch.equal(views, before)


def test_the_magnitude_reaches_the_operations():
    draw = draw_strong(500, 8, 8, True, generator(12), operations=3, magnitude=2)
    assert draw.operations.setting.shape == (500, 3)
    assert {SETTINGS[i].magnitude for i in draw.operations.setting.flatten().tolist()} == {1, 2}


def test_an_empty_batch_has_views():
    assert weak(pictures(0, 8, 8, 3), draw_weak(0, 8, 8, True, generator(13))).shape == (0, 8, 8, 3)
    assert strong(pictures(0, 8, 8, 3), draw_strong(0, 8, 8, True, generator(13))).shape == (0, 8, 8, 3)


class HostReads(TorchDispatchMode):
    """Refuses operations that make the host wait for the device."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "bincount", "histc")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.READS, f"{name} reads from the device"
        masks = args[1] if name in ("index", "index_put", "index_put_") else ()
        assert not any(mask is not None and mask.dtype in (torch.bool, torch.uint8) for mask in masks), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("channels", [1, 3])
def test_views_are_made_without_reading_from_the_device(channels, monkeypatch):
    images, draw = pictures(300, 32, 32, channels), draw_strong(300, 32, 32, True, generator(14))
    # These do not pass through the dispatcher on a CPU.
    for name in ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} reads from the device"))
    with HostReads():
        weak(images, draw.weak)
        strong(images, draw)


@pytest.mark.parametrize("channels", [1, 3])
def test_views_can_be_made_where_nothing_can_be_read(channels):
    """Tensors on "meta" have shapes but no numbers: what depends on a number fails there."""
    images, draw = pictures(300, 32, 32, channels).to("meta"), draw_strong(300, 32, 32, True, generator(14))
    assert strong(images, draw.to("meta", non_blocking=True)).shape == images.shape
    assert weak(images, draw.weak.to("meta", non_blocking=True)).shape == images.shape


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(("height", "width", "channels"), SIZES)
def test_views_on_cuda_are_those_on_the_cpu(height, width, channels):
    images, draw = pictures(600, height, width, channels), draw_strong(600, height, width, True, generator(15))
    strong(images.cuda(), draw.to("cuda"))  # tables move at their first use
    there, moved = images.cuda(), draw.to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        views, weak_views = strong(there, moved), weak(there, moved.weak)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(views.cpu(), strong(images, draw))
    assert torch.equal(weak_views.cpu(), weak(images, draw.weak))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(4, 8, 8, 3), "images must be uint8, got torch.float32"),
        (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), r"shape \(N, H, W, 1 or 3\), got \(4, 3, 8, 8\)"),
        (torch.zeros(4, 8, 8, dtype=torch.uint8), r"shape \(N, H, W, 1 or 3\), got \(4, 8, 8\)"),
        (torch.zeros(5, 8, 8, 3, dtype=torch.uint8), r"4 images of 8 x 8 pixels, got .* \(5, 8, 8, 3\)"),
        (torch.zeros(4, 8, 9, 3, dtype=torch.uint8), r"4 images of 8 x 8 pixels, got .* \(4, 8, 9, 3\)"),
        (torch.zeros(4, 8, 8, 3, dtype=torch.uint8, device="meta"), "on meta like the images, got cpu"),
    ],
)
def test_images_that_a_draw_does_not_fit_are_refused(images, message):
    draw = draw_strong(4, 8, 8, True, generator(16))
    assert isinstance(draw, StrongDraw)
    with pytest.raises(ValueError, match=message):
        weak(images, draw.weak)
    with pytest.raises(ValueError, match=message):
        strong(images, draw)
