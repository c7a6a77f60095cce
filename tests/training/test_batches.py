"""Batches are functions of seed and step: every item once a pass, shares that make up the whole, nothing remembered."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import toy_data

from ccssl.training.batches import Batches, Images, Stream, generator


@given(st.integers(1, 20), st.integers(0, 50), st.integers(1, 60), st.integers(0, 3))
def test_a_stream_passes_over_all_items_before_it_repeats_one(size, start, count, seed):
    whole = Stream(size, seed, 0).at(0, start + count)
    for first in range(0, len(whole) - size + 1, size):
        assert sorted(whole[first : first + size]) == list(range(size))
    assert np.array_equal(Stream(size, seed, 0).at(start, count), whole[start:])


def test_passes_seeds_and_purposes_differ():
    orders = [Stream(50, seed, purpose).at(start, 50) for seed in (0, 1) for purpose in (0, 1) for start in (0, 50)]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_generators_of_different_purposes_differ_and_those_of_one_agree():
    draws = {key: torch.rand(4, generator=generator(*key)) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}
    assert len({tuple(draw.tolist()) for draw in draws.values()}) == 4
    assert torch.equal(torch.rand(4, generator=generator(0, 1, 0)), draws[0, 1, 0])


def batches(rank=0, world=1, batch=8, mu=3, seed=0):
    data = toy_data()
    images = Images(data.train_images, torch.device("cpu"))
    ids = np.arange(240)
    return Batches(
        images,
        data.train_labels,
        ids[:16],
        ids[16:],
        batch=batch,
        mu=mu,
        flip=True,
        seed=seed,
        rank=rank,
        world=world,
    )


def leaves(part):
    return [part] if isinstance(part, torch.Tensor) else [leaf for item in part for leaf in leaves(item)]


def test_a_batch_is_what_its_ids_say():
    data, source = toy_data(), batches()
    labeled, unlabeled = source.ids(5)
    batch = source.at(5)
    assert np.array_equal(batch.labeled.images.numpy(), data.train_images[labeled])
    assert np.array_equal(batch.labeled.labels.numpy(), data.train_labels[labeled])
    assert batch.unlabeled is not None
    assert np.array_equal(batch.unlabeled.images.numpy(), data.train_images[unlabeled])
    assert np.array_equal(source.unlabeled[batch.unlabeled.places.numpy()], unlabeled)


@pytest.mark.parametrize("world", [2, 4])
def test_the_shares_of_all_ranks_make_up_the_batch(world):
    whole = batches().at(3)
    parts = [batches(rank, world).at(3) for rank in range(world)]
    assert torch.equal(torch.cat([p.labeled.images for p in parts]), whole.labeled.images)
    assert torch.equal(torch.cat([p.unlabeled.places for p in parts]), whole.unlabeled.places)


def test_reading_ahead_gives_the_same_batches():
    source = batches()
    for step, batch in enumerate(source.ahead(2, 6), start=2):
        again = batches().at(step)
        assert torch.equal(batch.labeled.images, again.labeled.images)
        assert torch.equal(batch.unlabeled.places, again.unlabeled.places)


def test_a_fault_while_reading_ahead_reaches_the_loop(monkeypatch):
    source = batches()
    monkeypatch.setattr(source.images, "take", lambda rows: (_ for _ in ()).throw(OSError("gone")))
    with pytest.raises(OSError, match="gone"):
        next(source.ahead(0, 3))
