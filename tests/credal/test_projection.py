"""The projection: its properties, its oracles, its limits, and what it refuses."""

import functools
import itertools

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import isotonic_projection, kl, levels, logits_and_pi, problems

from ccssl.credal import Levels, contains, project, project_logits
from ccssl.credal.reference import project_reference

SLOPES = 1e-9


@given(problems())
def test_the_projection_lies_in_the_credal_set(problem):
    logits, pi = problem
    p = project_logits(logits, pi)
    assert contains(p, pi, atol=1e-12).all()
    assert (p[pi == 0] == 0).all()


@given(problems())
def test_karush_kuhn_tucker(problem):
    """Sufficient for the optimum: p = q r, r never falls along pi, and rises only where a constraint is tight."""
    logits, pi = problem
    log_q, p = logits.log_softmax(-1)[0], project_logits(logits, pi)[0]
    order = pi[0].argsort(stable=True)
    bound, mass = pi[0][order], p[order].cumsum(-1)
    log_r = (p.log() - log_q)[order]
    positive = [i for i in range(len(order)) if p[order[i]] > 1e-250]
    for i, j in itertools.pairwise(positive):
        step = float(log_r[j] - log_r[i])
        assert step >= -SLOPES
        if step > SLOPES:  # some partial sum between the two classes reaches its bound
            assert float((bound[i:j] - mass[i:j]).abs().min()) < 1e-12


@given(problems())
def test_projecting_twice_changes_nothing(problem):
    logits, pi = problem
    p = project_logits(logits, pi)
    torch.testing.assert_close(project(p, pi), p, rtol=0, atol=1e-12)


@given(problems(), st.randoms(use_true_random=False))
def test_permuting_classes_permutes_the_projection(problem, random):
    logits, pi = problem
    order = list(range(logits.shape[-1]))
    random.shuffle(order)
    permuted = project_logits(logits[:, order], pi[:, order])
    torch.testing.assert_close(permuted, project_logits(logits, pi)[:, order], rtol=0, atol=1e-12)


@given(problems())
def test_a_member_of_the_set_is_its_own_projection_exactly(problem):
    logits, pi = problem
    inside = project_logits(logits, pi).clamp(min=1e-300)
    mixed = (inside / inside.sum()).log()
    wide = torch.maximum(pi, torch.ones_like(pi) * (pi > 0))
    torch.testing.assert_close(project_logits(mixed, wide), mixed.softmax(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [0.1, 1, 5, 10])
@pytest.mark.parametrize("classes", [2, 3, 10, 100, 1000])
def test_equals_isotonic_regression_by_scipy(scale, classes):
    logits, pi = logits_and_pi(20, classes, scale, seed=classes)
    q = logits.softmax(-1)
    oracle = np.stack([isotonic_projection(a, b) for a, b in zip(q.numpy(), pi.numpy(), strict=True)])
    for p in (project(q, pi), project_logits(logits, pi)):
        np.testing.assert_allclose(p.numpy(), oracle, rtol=0, atol=1e-12)


@pytest.mark.parametrize("classes", [2, 3, 5, 10, 30])
def test_equals_algorithm_1(classes):
    logits, pi = logits_and_pi(60, classes, 3, seed=classes)
    torch.testing.assert_close(
        project_logits(logits, pi), project_reference(logits.softmax(-1), pi), rtol=0, atol=1e-9
    )


@functools.cache
def exponential_cone_programme(classes):
    """min KL(p || q) with p in ascending order of pi, as a convex solver wants it."""
    p, q, bound = cvxpy.Variable(classes), cvxpy.Parameter(classes, pos=True), cvxpy.Parameter(classes, pos=True)
    constraints = [p >= 0, cvxpy.sum(p) == 1, cvxpy.cumsum(p) <= bound]
    return cvxpy.Problem(cvxpy.Minimize(cvxpy.sum(cvxpy.kl_div(p, q))), constraints), q, bound


@pytest.mark.parametrize("classes", [3, 6, 12])
def test_costs_what_a_convex_solver_finds(classes):
    """Clarabel's objective is good to 1e-7, its p only to 1e-4; impossible classes have p = 0 and stay out."""
    logits, pi = logits_and_pi(120, classes, 2, seed=classes)
    ours = kl(project_logits(logits, pi), logits)
    for row in range(len(logits)):
        order = [k for k in pi[row].argsort().tolist() if pi[row, k] > 0]
        programme, q, bound = exponential_cone_programme(len(order))
        q.value, bound.value = logits[row].softmax(-1)[order].numpy(), pi[row][order].numpy()
        programme.solve(solver="CLARABEL")
        # kl_div sums p log(p / q) - p + q: the classes left out would have added their q
        assert abs(programme.value + 1 - q.value.sum() - float(ours[row])) < 1e-6


@settings(max_examples=50)
@given(st.integers(2, 40), st.integers(0, 200), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_levels_equal_the_dense_degrees(classes, size, proportional, with_top, seed):
    pi = levels(7, classes, size, "proportional" if proportional else "top", seed, with_top and not proportional)
    logits, _ = logits_and_pi(7, classes, 3, seed)
    dense = project_logits(logits, pi.dense(torch.float64))
    torch.testing.assert_close(project_logits(logits, pi), dense, rtol=0, atol=1e-12)


def test_leading_shapes_and_broadcasting():
    logits, pi = logits_and_pi(24, 5, 2, seed=0)
    flat = project_logits(logits, pi)
    assert torch.equal(project_logits(logits.view(2, 3, 4, 5), pi.view(2, 3, 4, 5)), flat.view(2, 3, 4, 5))
    assert torch.equal(project_logits(logits[0], pi[0]), flat[0])
    one_for_all = project_logits(logits, pi[0])
    assert torch.equal(one_for_all[3:4], project_logits(logits[3:4], pi[:1]))
    transposed = project_logits(logits.T.contiguous().T, pi.T.contiguous().T)  # not contiguous
    assert torch.equal(transposed, flat)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types(dtype):
    logits, pi = logits_and_pi(50, 20, 3, seed=1)
    logits = logits.to(dtype)
    p = project_logits(logits, pi.float())
    wide = torch.promote_types(dtype, torch.float32)
    assert p.dtype == wide
    exact = project_logits(logits.double(), pi.float().double())
    torch.testing.assert_close(p.double(), exact, rtol=0, atol=16 * torch.finfo(wide).eps)
    assert project(logits.softmax(-1), pi).dtype == dtype
    assert project_logits(logits, pi).dtype == torch.float64  # the wider of the two


def test_underflow_is_decided_by_the_logits():
    logits = torch.tensor([[0.0, -1e4, -2e4], [1e4, -1e4, -1e4], [-1e4, 0.0, -1e4 + 1]])
    pi = torch.tensor([[0.1, 0.4, 1.0], [0.0, 0.5, 1.0], [1.0, 0.25, 1.0]])
    expected = torch.tensor([[0.1, 0.3, 0.6], [0.0, 0.5, 0.5], [0.75 / (1 + np.e), 0.25, 0.75 * np.e / (1 + np.e)]])
    torch.testing.assert_close(project_logits(logits, pi), expected)
    # in a row of one block all of the mass of which underflows
    wide = project_logits(torch.tensor([[0.0, -500.0, -501.0]]), torch.tensor([[0.0, 1.0, 1.0]]))
    torch.testing.assert_close(wide, torch.tensor([[0.0, 1 / (1 + 1 / np.e), 1 / (1 + np.e)]]))


@pytest.mark.parametrize("size", [1e3, 1e10, 1e15, 1e30, 1e300, 1.7e308])
def test_logits_of_any_size_lose_no_digit(size):
    """A logarithm of a mass beside such logits would: 1e15 - 0.7 has one digit behind the point."""
    for dtype in (torch.float64, torch.float32):
        huge = min(size, 3e38) if dtype == torch.float32 else size
        logits = torch.tensor([huge, -huge, 0.0, 0.0, 1 - huge], dtype=dtype)
        p = project_logits(logits, torch.tensor([0.05, 1.0, 0.1, 0.1, 0.1], dtype=dtype))
        torch.testing.assert_close(
            p, torch.tensor([0.05, 0.9, 0.025, 0.025, 0.0], dtype=dtype), rtol=1e-6, atol=1e-9
        )
        assert abs(float(p.sum()) - 1) < 4 * torch.finfo(dtype).eps


def test_zero_probabilities_get_mass_only_if_they_must():
    q = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    pi = torch.tensor([[0.4, 1.0, 1.0], [1.0, 1.0, 1.0]])
    torch.testing.assert_close(project(q, pi), torch.tensor([[0.4, 0.3, 0.3], [0.5, 0.5, 0.0]]))


LOGITS, PI = torch.zeros(2, 3), torch.tensor([[0.2, 1.0, 0.4]]).expand(2, 3)


@pytest.mark.parametrize(
    ("logits", "pi", "message"),
    [
        (torch.zeros(2, 1), torch.ones(2, 1), r"logits .*at least 2 classes, got shape \(2, 1\)"),
        (torch.zeros(0, 3), torch.ones(0, 3), r"logits is an empty batch: it has shape \(0, 3\)"),
        (LOGITS.long(), PI, "logits must be floating point, got torch.int64"),
        (LOGITS, PI.long(), "pi must be floating point or Levels, got torch.int64"),
        (LOGITS, torch.ones(2, 4), r"pi must have as many classes as logits, 3, got shape \(2, 4\)"),
        (LOGITS, torch.ones(5, 3), r"pi must have the shape of logits, \(2, 3\), got \(5, 3\)"),
        (LOGITS, PI.to("meta"), "pi must be on cpu like logits, got meta"),
        (LOGITS.numpy(), PI, r"logits must be a tensor, got ndarray: convert it with torch.as_tensor"),
        ([[0.0, 1.0]], PI, "logits must be a tensor, got list"),
        (LOGITS, PI.numpy(), "pi must be a tensor, got ndarray"),
        (torch.tensor([[0, torch.nan, 0]]), PI[:1], "logits must be finite, got nan in row 0, class 1"),
        (torch.tensor([[0, 0, torch.inf]]), PI[:1], "logits must be finite, got inf in row 0, class 2"),
        (torch.tensor([[0, 0, -torch.inf]]), PI[:1], "logits must be finite, got -inf in row 0, class 2"),
        (LOGITS, PI - torch.tensor([[0.0], [0.25]]), r"pi must lie in \[0, 1\], got -0.05 in row 1, class 0"),
        (LOGITS, PI * 3, r"pi must lie in \[0, 1\], got 3 in row 0, class 1"),
        (LOGITS, PI * torch.nan, r"pi must lie in \[0, 1\], got nan in row 0"),
        (LOGITS, PI * 0.5, "pi must have maximum 1 in each row, got 0.5 in row 0: normalise"),
        (LOGITS, Levels(torch.tensor([[0, 1, 9]]), 4), r"counts must lie in -1..4, got 9 in row 0, class 2"),
        (LOGITS, Levels(torch.tensor([[0, 1, -2]]), 4), r"counts must lie in -1..4, got -2 in row 0, class 2"),
        (LOGITS, Levels(torch.tensor([[-1, -1, -1]]), 4), "counts must leave a class possible .* row 0"),
        (LOGITS, Levels(torch.zeros(2, 3).int(), 4, "top", torch.tensor([0, 3])), r"top must lie in 0..2, got 3"),
    ],
)
@pytest.mark.parametrize("kernel", ["numba", "torch", "triton"])
def test_wrong_input_is_named(logits, pi, message, kernel, use_kernel):
    use_kernel(kernel)
    with pytest.raises(ValueError, match=message):
        project_logits(logits, pi)
    if isinstance(pi, Levels) and "counts" in message:  # the sparse path, with many more levels than classes
        many = Levels(torch.where(pi.counts > 4, 5000, pi.counts), 4000)
        with pytest.raises(ValueError, match="counts must"):
            project_logits(logits, many)


@pytest.mark.parametrize("kernel", ["numba", "torch", "triton"])
def test_without_validation_nothing_is_raised_and_good_rows_stay_good(kernel, use_kernel):
    use_kernel(kernel)
    logits = torch.tensor([[0.0, torch.nan, 0.0], [0.0, 0.0, 0.0]])
    p = project_logits(logits, PI, validate=False)
    assert p[0].isnan().any()
    torch.testing.assert_close(p[1], torch.tensor([0.2, 0.6, 0.2]))


def test_validate_is_yes_no_or_not_said():
    for call in (project_logits, project):
        with pytest.raises(ValueError, match="validate must be True, False or None, got 'x'"):
            call(PI / PI.sum(-1, keepdim=True), PI, validate="x")


@pytest.mark.parametrize("q", [[0.5, 0.2, 0.1], [1.2, -0.1, -0.1], [torch.nan, 0.5, 0.5]])
def test_project_refuses_what_is_no_distribution(q):
    with pytest.raises(ValueError, match="q must hold distributions"):
        project(torch.tensor([q]), PI[:1])


def test_no_gradient_flows_through_the_projection():
    logits = torch.zeros(2, 3, requires_grad=True)
    assert not project_logits(logits, PI).requires_grad
    assert not project(logits.softmax(-1), PI).requires_grad
