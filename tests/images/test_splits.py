"""Splits: nobody has two roles, the counts are those asked for, and the seed decides the rest."""

import json
from collections import Counter
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from ccssl.errors import InputError
from ccssl.images.splits import SAMPLINGS, Split, apportion, make_split

TRAINING = ("labeled", "calibration", "unlabeled", "validation")


def pool(items=1000, classes=10, seed=0, skew=False, unknown=0):
    """Return labels in random order; every class occurs, with ``skew`` the last ones rarely."""
    generator = np.random.default_rng(seed)
    weights = 0.5 ** np.arange(classes) if skew else np.ones(classes)
    labels = generator.choice(classes, size=items - classes, p=weights / weights.sum())
    labels = np.concatenate([labels, np.arange(classes), np.full(unknown, -1)])
    return generator.permutation(labels)


def ids(split):
    return {role: getattr(split, role).tolist() for role in (*TRAINING, "test")}


@st.composite
def arguments_of_make_split(draw):
    """Draw arguments of make_split, possible ones and impossible ones."""
    classes = draw(st.integers(2, 8))
    return {
        "train_labels": pool(
            draw(st.integers(classes, 150)),
            classes,
            draw(st.integers(0, 5)),
            draw(st.booleans()),
            draw(st.integers(0, 20)),
        ),
        "test_size": draw(st.integers(0, 9)),
        "classes": classes,
        "labels": draw(st.integers(1, 90)),
        "seed": draw(st.integers(0, 2**40)),
        "sampling": draw(st.sampled_from(SAMPLINGS)),
        "calibration_fraction": draw(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9])),
        "validation": draw(st.integers(0, 30)),
        "include_labeled": draw(st.booleans()),
    }


def make(arguments):
    """Return the split; discard the example where there is none."""
    try:
        return make_split(**arguments)
    except InputError:
        assume(False)


@settings(max_examples=50)
@given(arguments_of_make_split())
def test_every_item_has_one_role_and_no_label_is_invented(arguments):
    split = make(arguments)
    labels = arguments["train_labels"]
    roles = Counter(i for role in TRAINING for i in getattr(split, role).tolist())
    assert sorted(roles) == list(range(len(labels))), "an item has no role"
    twice = {i for i, count in roles.items() if count > 1}
    assert twice == (set(split.labeled.tolist()) if arguments["include_labeled"] else set())
    for role in ("labeled", "calibration", "validation"):
        assert (labels[getattr(split, role)] >= 0).all()
    for field in (*TRAINING, "test"):
        found = getattr(split, field)
        assert found.dtype == np.int64
        assert (np.diff(found) > 0).all()
    assert split.test.tolist() == list(range(arguments["test_size"]))
    assert len(split.validation) == arguments["validation"]
    split.check()


@settings(max_examples=50)
@given(arguments_of_make_split())
def test_the_numbers_are_those_asked_for(arguments):
    split = make(arguments)
    labels, classes, fraction = (arguments[key] for key in ("labels", "classes", "calibration_fraction"))
    chosen = np.concatenate([split.labeled, split.calibration])
    if arguments["sampling"] == "balanced":
        assert np.bincount(arguments["train_labels"][chosen]).tolist() == [labels // classes] * classes
    else:
        assert len(chosen) == labels
    assert len(split.calibration) == round(fraction * len(chosen))
    assert len(split.labeled) > 0


@settings(max_examples=50)
@given(arguments_of_make_split())
def test_the_seed_decides_and_later_choices_do_not_change_earlier_ones(arguments):
    split = make(arguments)
    assert ids(make_split(**arguments)) == ids(split)
    chosen = np.union1d(split.labeled, split.calibration)
    alone = make_split(**{**arguments, "calibration_fraction": 0.0, "validation": 0, "include_labeled": False})
    assert np.array_equal(alone.labeled, chosen), "methods must be compared on the same labels"
    fewer = arguments["labels"] // 2
    if fewer >= (arguments["classes"] if arguments["sampling"] == "balanced" else 1):
        part = make_split(**{**arguments, "labels": fewer, "calibration_fraction": 0.0, "validation": 0}).labeled
        assert np.isin(part, chosen).all(), "fewer labels are a part of more"


@settings(max_examples=50)
@given(arguments_of_make_split())
def test_json_keeps_everything(arguments):
    split = make(arguments)
    again = Split.from_json(json.loads(json.dumps(split.to_json())))
    for field in fields(Split):
        one, other = getattr(split, field.name), getattr(again, field.name)
        assert np.array_equal(one, other)
        assert type(one) is type(other)


def test_another_seed_gives_other_items():
    first, second = (
        make_split(pool(), 10, 10, 40, seed, calibration_fraction=0.25, validation=50) for seed in (0, 1)
    )
    for role in TRAINING:
        assert not np.array_equal(getattr(first, role), getattr(second, role))


def test_balanced_labels_are_floored_with_a_notice():
    split = make_split(pool(20_000, 62), 0, classes=62, labels=250, seed=0, calibration_fraction=0.25)
    assert len(split.labeled) + len(split.calibration) == 248
    assert len(split.calibration) == 62
    assert split.notices == ("248 labels are used, 4 a class: 250 cannot be shared by 62 classes.",)


def test_a_tenth_of_40_labels_is_4_items_of_10_classes():
    labels = pool()
    split = make_split(labels, 0, classes=10, labels=40, seed=3, calibration_fraction=0.1)
    calibrated = labels[split.calibration]
    assert len(calibrated) == len(set(calibrated)) == 4, "four classes with one item each"
    (notice,) = split.notices
    absent = ", ".join(str(c) for c in range(10) if c not in calibrated)
    assert notice == f"Classes without a calibration item: {absent} (4 items, 10 classes)."


def test_what_is_missing_is_said():
    split = make_split(pool(), 0, classes=10, labels=10, seed=0, calibration_fraction=0.5)
    assert len(split.notices) == 2
    assert "without a labeled training item" in split.notices[0]
    assert "without a calibration item" in split.notices[1]
    everything = make_split(pool(100), 0, classes=10, labels=100, seed=0, sampling="iid")
    assert everything.notices == ("No item is left unlabeled: only the supervised method can be used.",)
    assert make_split(pool(), 0, classes=10, labels=40, seed=0, calibration_fraction=0.25).notices == ()


@pytest.mark.parametrize(
    ("sampling", "fraction", "said"), [("balanced", 0.5, 1), ("balanced", 0, 0), ("iid", 0.5, 0)]
)
def test_balanced_calibration_on_an_unequal_pool_is_said(sampling, fraction, said):
    labels = np.concatenate([np.full(500, 0), np.full(100, 1)])
    split = make_split(labels, 0, 2, 40, seed=0, sampling=sampling, calibration_fraction=fraction)
    found = [notice for notice in split.notices if "unequal, from 100 to 500 items" in notice]
    assert len(found) == said


def test_the_unlabeled_pool_keeps_its_imbalance():
    labels = pool(5000, 8, skew=True, unknown=300)
    split = make_split(labels, 0, 8, 40, seed=0)
    expected = np.bincount(labels + 1, minlength=9) - np.array([0, *[5] * 8])
    assert np.bincount(labels[split.unlabeled] + 1, minlength=9).tolist() == expected.tolist()


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=9), share=st.floats(0, 1), seed=st.integers(0, 9))
def test_apportionment_is_by_largest_remainder(sizes, share, seed):
    total = sum(sizes)
    assume(total)
    count = int(share * total)
    found = apportion(np.array(sizes), count, np.random.default_rng(seed))
    assert found.sum() == count
    quotas = [Fraction(count * size, total) for size in sizes]
    assert all(quota // 1 <= n <= -(-quota // 1) for n, quota in zip(found, quotas, strict=True))
    assert (found <= np.array(sizes)).all()
    rest = [quota % 1 for quota in quotas]
    raised = [r for r, n, quota in zip(rest, found, quotas, strict=True) if n > quota // 1]
    kept = [r for r, n, quota in zip(rest, found, quotas, strict=True) if n == quota // 1]
    assert not raised or not kept or min(raised) >= max(kept), "a larger remainder went empty-handed"


def test_equal_remainders_are_decided_by_lot():
    met = Counter()
    for seed in range(400):
        met.update(np.flatnonzero(apportion(np.full(10, 4), 4, np.random.default_rng(seed))).tolist())
    # Each class is drawn with probability 0.4, 400 times; ten classes, one false alarm in a million.
    low, high = binom.ppf([5e-8, 1 - 5e-8], 400, 0.4)
    assert all(low <= met[c] <= high for c in range(10))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_item_is_equally_likely_within_its_class(sampling):
    labels = pool(60, 3, seed=1)
    roles = ("labeled", "calibration", "validation")
    met = {role: np.zeros(60) for role in roles}
    draws = 400
    for seed in range(draws):
        split = make_split(labels, 0, 3, 12, seed, sampling, calibration_fraction=0.25, validation=6)
        for role in roles:
            met[role][getattr(split, role)] += 1
    for role in roles:
        for c in range(3):
            members = met[role][labels == c]
            # Given the draws of the class, each member has an equal share; 9 groups, 60 items.
            low, high = binom.ppf([1e-9, 1 - 1e-9], draws, members.sum() / (draws * len(members)))
            assert low <= members.min()
            assert members.max() <= high


def test_choices_for_different_purposes_do_not_depend_on_each_other():
    labels, met, draws = np.array([0, 1, 0, 1]), Counter(), 2400
    for seed in range(draws):
        split = make_split(labels, 0, 2, 2, seed, "iid", calibration_fraction=0.5, validation=1)
        met[tuple(int(getattr(split, role)[0]) for role in TRAINING)] += 1  # one item each
    assert len(met) == 24
    low, high = binom.ppf([1e-8, 1 - 1e-8], draws, 1 / 24)
    assert low <= min(met.values())
    assert max(met.values()) <= high


def test_iid_calibration_items_are_not_stratified():
    # Half of the labels of two equal classes: stratified, the calibration set would never be of one class only.
    labels = np.arange(200) % 2
    alike = 0
    for seed in range(300):
        split = make_split(labels, 0, 2, 8, seed, "iid", calibration_fraction=0.25)
        alike += len(set(labels[split.calibration])) == 1
    low, high = binom.ppf([1e-7, 1 - 1e-7], 300, 99 / 199)  # the second item is of the class of the first
    assert low <= alike <= high
    balanced = make_split(labels, 0, 2, 8, 0, "balanced", calibration_fraction=0.25)
    assert set(labels[balanced.calibration]) == {0, 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": 9}, "9 labels are fewer than the 10 classes; take at least 10, or draw them at random"),
        ({"labels": 2000}, r"class \d has \d+ items with a known label, but 2000 balanced labels need 200 of each"),
        ({"labels": 0}, "labels must be at least 1, got 0"),
        ({"labels": 1001, "sampling": "iid"}, "1,001 labels are more than the 1,000 items whose label is known"),
        ({"sampling": "random"}, "sampling must be one of balanced, iid, got 'random'"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"validation": 970}, "validation asks for 970 items, but only 960 with a known label are left"),
        ({"validation": -1}, "validation and test_size must be at least 0"),
        ({"calibration_fraction": 0.01}, "0.01 of 40 labels leaves no calibration item; take at least 0.025"),
        ({"calibration_fraction": 0.99}, "0.99 of 40 labels leaves none to train on"),
        ({"calibration_fraction": 1.0}, r"calibration_fraction must be in \[0, 1\).*got 1.0"),
        ({"calibration_fraction": -0.1}, r"calibration_fraction must be in \[0, 1\).*got -0.1"),
        ({"calibration_fraction": float("nan")}, r"calibration_fraction must be in \[0, 1\).*got nan"),
        ({"classes": 1}, "classes must be at least 2, got 1"),
        ({"classes": 9}, r"train_labels must be in 0..8, or -1 where unknown; item \d+ has 9"),
        ({"classes": 11}, "class 10 has 0 items with a known label.*leave the class out"),
        ({"train_labels": np.zeros(5)}, "train_labels must be a list of integers, got float64"),
        ({"train_labels": np.zeros((5, 2), dtype=int)}, r"train_labels must be a list of integers.*\(5, 2\)"),
    ],
)
def test_mistakes_are_named(changes, message):
    arguments = {"train_labels": pool(), "test_size": 5, "classes": 10, "labels": 40, "seed": 0, **changes}
    with pytest.raises(InputError, match=message):
        make_split(**arguments)


def a_split(**changes):
    split = make_split(pool(), 20, 10, 40, seed=0, calibration_fraction=0.25, validation=30)
    return replace(split, **{role: np.array(found) for role, found in changes.items()})


@pytest.mark.parametrize("one", TRAINING)
@pytest.mark.parametrize("other", TRAINING)
def test_a_planted_overlap_is_found(one, other):
    if one == other:
        return
    split = a_split()
    stray = getattr(split, one)[3]
    planted = a_split(**{other: np.sort(np.append(getattr(split, other), stray))})
    first, second = sorted((one, other), key=TRAINING.index)
    with pytest.raises(InputError, match=rf"{first} and {second} overlap.*: {stray}$"):
        planted.check()
    with pytest.raises(InputError, match="overlap"):
        Split.from_json(planted.to_json())


def test_calibration_items_in_the_pool_are_found_even_when_labeled_ones_may_be_there():
    split = make_split(pool(), 0, 10, 40, seed=0, calibration_fraction=0.25, include_labeled=True)
    split.check()
    with pytest.raises(InputError, match="calibration and unlabeled overlap"):
        replace(split, unlabeled=np.union1d(split.unlabeled, split.calibration[:1])).check()
    with pytest.raises(InputError, match=rf"but lacks: {split.labeled[0]}$"):
        replace(split, unlabeled=np.setdiff1d(split.unlabeled, split.labeled[:1])).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labeled": [5, 1000]}, r"labeled has ids outside 0..999: 1000"),
        ({"test": [-1, 3]}, r"test has ids outside 0..19: -1"),
        ({"validation": [4, 2, 9]}, "validation must be ascending without repetition; out of place: 2"),
        ({"validation": [4, 4]}, "validation must be ascending without repetition; out of place: 4"),
        ({"unlabeled": [0.5]}, "unlabeled must be a list of ids, integers, got float64"),
        ({"labeled": list(range(2000, 2020))}, r"labeled has ids outside 0..999: 2000, .*, 2009 and 10 more"),
    ],
)
def test_check_names_what_is_wrong(changes, message):
    with pytest.raises(InputError, match=message):
        a_split(**changes).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labeled": None}, "labeled of the split must be a list of integers"),
        ({"labeled": [1.0]}, "labeled of the split must be a list of integers"),
        ({"labeled": [True]}, "labeled of the split must be a list of integers"),
        ({"train_size": "many"}, "train_size of the split must be an integer, got 'many'"),
    ],
)
def test_a_damaged_file_is_named(changes, message):
    with pytest.raises(InputError, match=message):
        Split.from_json({**a_split().to_json(), **changes})


def test_an_incomplete_file_is_named():
    content = a_split().to_json()
    del content["calibration"], content["notices"]
    with pytest.raises(InputError, match="the split lacks calibration, notices"):
        Split.from_json(content)
