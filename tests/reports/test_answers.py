"""What a finished run's network answers when it is asked again: what its final figures were taken from."""

import numpy as np
import pytest
import torch

from ccssl.credal import contains, project
from ccssl.experiments.run import read_result
from ccssl.metrics import DELTAS
from ccssl.reports.answers import look


@pytest.fixture(scope="module")
def seen(runs):
    return look(runs["ccssl-prop", 0])


@pytest.mark.parametrize("method", ["supervised", "ccssl-prop", "cssl", "fixmatch"])
def test_answers_have_the_figures_of_the_run(method, runs):
    result, seen = read_result(runs[method, 0]), look(runs[method, 0])
    assert seen.test.right.mean() == pytest.approx(result["test"]["accuracy"])
    assert len(seen.test.labels) == result["split"]["test"]
    assert seen.unlabeled is not None
    if method != "supervised":
        assert seen.unlabeled.right.mean() == pytest.approx(result["unlabeled"]["accuracy"])
    credal = method in ("ccssl-prop", "cssl")
    for part, answers in (("test", seen.test), ("unlabeled", seen.unlabeled)):
        assert (answers.possibility is not None) == credal
        if answers.possibility is None:
            assert (answers.degrees == answers.probabilities).all()
            continue
        np.testing.assert_allclose(answers.possibility.max(1), 1)
        at_truth = answers.possibility[np.arange(len(answers.labels)), answers.labels]
        assert answers.possibility.mean() == pytest.approx(result[part]["efficiency"], abs=1e-6)
        for delta in DELTAS:
            assert (at_truth <= delta).mean() == pytest.approx(result[part][f"validity_error@{delta:g}"])
    assert (seen.audit is not None) == (seen.lesson is not None) == (method == "ccssl-prop")


def test_unlabeled_answers_are_about_unlabeled_images(seen):
    assert set(seen.unlabeled.ids) <= set(seen.split.unlabeled)
    assert (seen.unlabeled.labels == seen.data.train_labels[seen.unlabeled.ids]).all()


def test_the_audit_counts_the_errors_of_p_values(seen):
    assert seen.audit.calibration_items == len(seen.split.calibration)
    assert seen.audit.fresh_items == len(seen.split.test)
    for row in seen.audit.rows:  # degrees of possibility are never below p-values
        at_truth = seen.test.possibility[np.arange(60), seen.test.labels]
        assert (at_truth <= row.delta).mean() <= row.error


def test_the_lesson_follows_the_mathematics(seen):
    lesson = seen.lesson
    pi = torch.from_numpy(lesson.possibility)
    student, target = torch.from_numpy(lesson.student), torch.from_numpy(lesson.target)
    np.testing.assert_allclose(lesson.possibility, lesson.p_values / lesson.p_values.max(), atol=1e-6)
    assert bool(contains(target, pi, atol=1e-5))
    assert student.min() > 0
    torch.testing.assert_close(target, project(student, pi), atol=1e-4, rtol=0)
    kl = float(torch.special.xlogy(target, target / student).sum())
    assert lesson.loss == pytest.approx(kl, abs=1e-3)
    assert lesson.loss > 0  # a prediction within the set would teach nothing
    assert lesson.taught.sum() == pytest.approx(1)
    assert lesson.weak.shape == lesson.strong.shape == seen.data.train_images.shape[1:]
    assert 0 <= lesson.label < 4


def test_nobody_need_know_the_labels_of_unlabeled_images(secret_run):
    seen = look(secret_run)
    assert seen.unlabeled is not None
    assert (seen.unlabeled.labels == -1).all()
    assert not seen.unlabeled.right.any()
    assert seen.lesson is not None
    assert seen.lesson.label == -1


def test_looking_changes_nothing(runs):
    folder = runs["ccssl-prop", 0]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    one, other = look(folder), look(folder, "cpu")
    assert (one.test.probabilities == other.test.probabilities).all()
    assert (one.unlabeled.degrees == other.unlabeled.degrees).all()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
