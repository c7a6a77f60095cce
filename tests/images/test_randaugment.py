"""RandAugment: every operation is PIL's, on every setting; draws follow their law; rows are rows."""

from collections import Counter

import numpy as np
import pil_oracle as pil
import pytest
import torch
from scipy import stats

from ccssl.images.randaugment import OPERATIONS, SETTINGS, OperationDraw, draw_operations, randaugment

SIZES = [(32, 32), (8, 8), (17, 40), (40, 17), (96, 96), (1, 9)]
FALSE_ALARM = 1e-8  # of one test; all of them together stay far below one in a million


def pictures(n, height, width, channels, seed=0):
    """Return images of every sort: noise, low contrast, one colour, a dark slope with a bright corner."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (n, height, width, channels), dtype=torch.uint8, generator=generator)
    images[1::4] = images[1::4] // 9 + 60
    images[2::4] = images[2::4, :1, :1]
    slope = torch.linspace(0, 90, height * width).view(height, width, 1) + images[3::4] // 32
    images[3::4] = slope.to(torch.uint8)
    images[3::4, :2, :2] = 255
    return images


def settings_of(operation):
    return torch.tensor([i for i, setting in enumerate(SETTINGS) if setting.operation == operation])


def by_pil(images, setting):
    rows = zip(images.numpy(), setting.tolist(), strict=True)
    return np.stack([pil.to_pixels(pil.operate(pil.to_pil(a), [SETTINGS[i] for i in row])) for a, row in rows])


def test_every_operation_has_an_oracle():
    assert set(OPERATIONS) == set(pil.OPERATIONS)
    assert len(OPERATIONS) == 14
    assert Counter(setting.operation for setting in SETTINGS) == dict.fromkeys(OPERATIONS, 20)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_pils_byte_for_byte(operation, channels):
    changed = 0
    for height, width in SIZES:
        setting = settings_of(operation).repeat_interleave(4 if height < 96 else 1).unsqueeze(1)
        images = pictures(len(setting), height, width, channels)
        expected = by_pil(images, setting)
        found = randaugment(images, OperationDraw.plan(setting)).numpy()
        assert np.array_equal(found, expected), f"{height} x {width}"
        changed += (expected != images.numpy()).mean()
    assert (changed > 0) == (operation != "identity" and (operation, channels) != ("color", 1))


def test_operations_follow_one_another_as_in_pil():
    generator = torch.Generator().manual_seed(2)
    for chain in (0, 1, 2, 5):
        images = pictures(300, 12, 15, 3, seed=chain)
        setting = torch.randint(len(SETTINGS), (300, chain), generator=generator)
        assert np.array_equal(randaugment(images, OperationDraw.plan(setting)).numpy(), by_pil(images, setting))


def test_values_are_equalized_where_the_table_overflows():
    """With few pixels at the largest value PIL's table exceeds 255, which PIL cuts off."""
    for pixels in range(256, 520, 24):
        values = torch.arange(pixels).clamp(max=254).to(torch.uint8)
        values[-3:] = 255
        images, setting = values.view(1, 8, -1, 1), settings_of("equalize")[:1].unsqueeze(1)
        assert np.array_equal(randaugment(images, OperationDraw.plan(setting)).numpy(), by_pil(images, setting))


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_does_not_depend_on_its_neighbours(channels):
    images = pictures(80, 9, 16, channels)
    draw = draw_operations(80, torch.Generator().manual_seed(3), operations=3)
    together = randaugment(images, draw)
    alone = [randaugment(images[i : i + 1], draw[i : i + 1]) for i in range(80)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("rows", [slice(3, 40), slice(1, None, 3), slice(0, 0), torch.tensor([5, 5, 0, 79])])
def test_rows_of_a_draw_are_the_draws_of_rows(rows):
    images = pictures(80, 9, 16, 3)
    draw = draw_operations(80, torch.Generator().manual_seed(4))
    assert torch.equal(randaugment(images[rows], draw[rows]), randaugment(images, draw)[rows])
    assert len(draw[rows]) == len(images[rows])


def test_settings_are_drawn_uniformly():
    """Half of the draws are identities for the coin, the others spread evenly over all settings."""
    draws = 60_000
    setting = draw_operations(draws, torch.Generator().manual_seed(5)).setting
    found = torch.bincount(setting.flatten(), minlength=len(SETTINGS)).numpy()
    expected = np.full(len(SETTINGS), 0.5 / len(SETTINGS))
    expected[found.argmax()] += 0.5  # whichever setting of the identity the coin's tails are written as
    assert SETTINGS[found.argmax()].operation == "identity"
    assert stats.chisquare(found, 2 * draws * expected).pvalue > FALSE_ALARM


def test_the_operations_of_an_image_are_drawn_independently():
    draws = 60_000
    operation = draw_operations(draws, torch.Generator().manual_seed(6)).setting // 20
    share = np.full(len(OPERATIONS), 1 / 28)
    share[OPERATIONS.index("identity")] += 1 / 2
    found = torch.bincount(operation[:, 0] * len(OPERATIONS) + operation[:, 1], minlength=14 * 14).numpy()
    assert stats.chisquare(found, draws * np.outer(share, share).flatten()).pvalue > FALSE_ALARM


@pytest.mark.parametrize("magnitude", [1, 4, 9, 10])
def test_magnitudes_are_drawn_up_to_the_largest(magnitude):
    setting = draw_operations(20_000, torch.Generator().manual_seed(7), operations=1, magnitude=magnitude).setting
    drawn = [SETTINGS[i] for i in setting.flatten().tolist()]
    found = Counter(s.magnitude for s in drawn if s.operation != "identity")
    assert sorted(found) == list(range(1, magnitude + 1))
    assert magnitude == 1 or stats.chisquare(list(found.values())).pvalue > FALSE_ALARM


def test_a_draw_is_the_generators_alone():
    state = torch.random.get_rng_state()
    first, again, other = (draw_operations(50, torch.Generator().manual_seed(seed)) for seed in (8, 8, 9))
    assert torch.equal(first.setting, again.setting)
    assert first.counts == again.counts
    assert not torch.equal(first.setting, other.setting)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_tables_serve_a_step_after_having_been_made_in_inference_mode():
    draw = draw_operations(50, torch.Generator().manual_seed(10))
    with torch.inference_mode():
        expected = randaugment(pictures(50, 10, 21, 3), draw)
    assert torch.equal(randaugment(pictures(50, 10, 21, 3), draw), expected)


@pytest.mark.parametrize("options", [{"magnitude": 0}, {"magnitude": 11}, {"operations": -1}])
def test_draws_that_make_no_sense_are_refused(options):
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"{name} must be .* got {value}"):
        draw_operations(4, torch.Generator(), **options)


def test_rows_are_not_selected_away_from_the_cpu():
    draw = draw_operations(4, torch.Generator()).to("meta")
    with pytest.raises(ValueError, match="before it leaves the CPU"):
        draw[:2]
