"""The gallery: the items that it says it shows, every class in its turn, and pictures that are what they were."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from ccssl.images.dataset import ImageData
from ccssl.reports import gallery
from ccssl.reports.answers import Answers


def answers(n=200, classes=5, seed=0, possible=True, known=1.0):
    """Return random answers about n items; a share ``known`` of the labels is known."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 2, (n, classes))
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = np.where(draw.random(n) < 0.7, probabilities.argmax(1), draw.integers(0, classes, n))
    counts = np.ceil(10 * probabilities / probabilities.max(1, keepdims=True)) / 10  # ties, as calibrations make
    return Answers(
        np.arange(n), probabilities, np.where(draw.random(n) < known, labels, -1), counts if possible else None
    )


@pytest.mark.parametrize("possible", [True, False])
def test_each_kind_is_what_its_name_says(possible):
    found = answers(possible=possible)
    openness = found.degrees.mean(1) if possible else -found.probabilities.max(1)
    predicted = found.predicted
    chosen = gallery.choose(found, 12)
    assert {kind: len(rows) for kind, rows in chosen.items()} == dict.fromkeys(gallery.KINDS, 12)
    ambiguous = chosen["ambiguous"]
    assert openness[ambiguous].tolist() == sorted(openness, reverse=True)[:12]
    # The first five certain items are the least open one of each class, the least open of all first.
    first = chosen["certain"][:5]
    assert sorted(predicted[first]) == list(range(5))
    for row in first:
        assert openness[row] == openness[predicted == predicted[row]].min()
    assert openness[first[0]] == openness.min()
    wrong = chosen["wrong"]
    assert not found.right[wrong].any()
    at_truth = found.degrees[np.arange(200), found.labels]
    assert at_truth[wrong[0]] == at_truth[~found.right].min()


def test_confident_errors_take_turns_among_pairs_of_classes():
    found = answers(n=400)
    chosen = gallery.choose(found, 8)["wrong"]
    pairs = list(zip(found.labels[chosen], found.predicted[chosen], strict=True))
    assert len(set(pairs)) == 8
    at_truth = found.degrees[np.arange(400), found.labels]
    for row, (label, predicted) in zip(chosen, pairs, strict=True):
        alike = (found.labels == label) & (found.predicted == predicted)
        assert at_truth[row] == at_truth[alike].min()


def test_what_nobody_knows_is_not_called_wrong():
    found = answers(known=0.3)
    assert (found.labels[gallery.choose(found, 50)["wrong"]] >= 0).all()
    assert gallery.choose(answers(known=0), 5)["wrong"] == []


def test_few_items_are_shown_once():
    chosen = gallery.choose(answers(n=3), 6)
    assert sorted(chosen["certain"]) == sorted(chosen["ambiguous"]) == [0, 1, 2]


def picture(shape):
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def opened(uri):
    head, _, data = uri.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


@pytest.mark.parametrize("shape", [(8, 8, 1), (8, 12, 3), (96, 96, 3)])
def test_small_pictures_keep_every_pixel(shape):
    image = picture(shape)
    np.testing.assert_array_equal(np.asarray(opened(gallery.data_uri(image))).reshape(shape), image)


def test_large_pictures_are_made_smaller_in_proportion():
    assert opened(gallery.data_uri(picture((300, 200, 3)))).size == (64, 96)


def shown(row, found, classes):
    images = picture((len(found.ids), 8, 8, 1))
    names = tuple(f"class {k}" for k in range(classes))
    data = ImageData("x", images, found.labels, images[:0], found.labels[:0], names, flip=False)
    return gallery.example(row, found, data)


def test_an_example_tells_all_of_few_classes():
    found = answers(n=4)
    item = shown(1, found, 5)
    assert item.predicted == f"class {found.predicted[1]}"
    assert item.confidence == found.probabilities[1].max()
    assert item.truth == f"class {found.labels[1]}"
    assert [bar.degree for bar in item.bars] == found.degrees[1].tolist()
    assert [bar.name for bar in item.bars if bar.true] == [item.truth]
    assert [bar.name for bar in item.bars if bar.predicted] == [item.predicted]
    assert item.others is None


def test_of_many_classes_the_most_possible_ones_and_the_true_one_have_bars():
    found = answers(n=60, classes=40)
    for row in range(60):
        item = shown(row, found, 40)
        degrees = [bar.degree for bar in item.bars]
        assert len(degrees) == gallery.MOST_BARS
        assert item.truth in [bar.name for bar in item.bars]
        assert any(bar.predicted for bar in item.bars)
        assert degrees[:-1] == sorted(found.degrees[row], reverse=True)[: gallery.MOST_BARS - 1]
        count, largest = item.others
        assert count == 30
        names = {bar.name for bar in item.bars}
        assert largest == max(d for k, d in enumerate(found.degrees[row]) if f"class {k}" not in names)


def test_an_example_of_unknown_truth_marks_no_class():
    item = shown(0, answers(n=2, known=0), 5)
    assert item.truth is None
    assert not any(bar.true for bar in item.bars)
