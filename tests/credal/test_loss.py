"""The losses: values, limits, gradients, and life inside torch's machinery."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import kl, levels, logits_and_pi, problems
from torch.utils._python_dispatch import TorchDispatchMode

from ccssl.credal import credal_loss, project_logits, relaxation_loss
from ccssl.credal.reference import credal_loss_reference


@given(problems())
def test_is_the_divergence_of_the_projection(problem):
    logits, pi = problem
    expected = kl(project_logits(logits, pi), logits)
    torch.testing.assert_close(credal_loss(logits, pi, reduction="none"), expected, rtol=1e-9, atol=1e-10)


@given(problems(), st.floats(0, 1))
def test_a_larger_set_never_costs_more(problem, share):
    logits, pi = problem
    larger = pi + share * (1 - pi)
    assert credal_loss(logits, larger) <= credal_loss(logits, pi) + 1e-12


@given(problems())
def test_exactly_zero_for_a_member_of_the_set(problem):
    logits, pi = problem
    logits = logits.clamp(-30, 30).requires_grad_()
    q = logits.detach().softmax(-1)
    order = pi[0].argsort()
    reach = torch.zeros_like(pi).scatter(-1, order[None], q[:, order].cumsum(-1))  # the least pi that holds q
    slack = torch.maximum(pi, reach * 1.001).clamp(max=1)
    loss = credal_loss(logits, slack)
    loss.backward()
    assert loss == 0
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("classes", [3, 12])
def test_equals_algorithm_1(classes):
    logits, pi = logits_and_pi(80, classes, 2, seed=3)
    torch.testing.assert_close(
        credal_loss(logits, pi, reduction="none"), credal_loss_reference(logits, pi), rtol=0, atol=1e-9
    )


def test_one_possible_class_is_cross_entropy_and_total_ignorance_is_free():
    logits = 3 * torch.randn(40, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.arange(40) % 7
    logits.requires_grad_()
    ours = torch.autograd.grad(credal_loss(logits, torch.nn.functional.one_hot(labels, 7).double()), logits)[0]
    theirs = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels), logits)[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)
    free = credal_loss(logits, torch.ones(7, dtype=torch.float64))
    assert free == 0
    assert (torch.autograd.grad(free, logits)[0] == 0).all()


def test_gradient_is_prediction_minus_projection():
    logits, pi = logits_and_pi(30, 8, 2, seed=5)
    logits.requires_grad_()
    gradient = torch.autograd.grad(credal_loss(logits, pi, reduction="sum"), logits)[0]
    expected = logits.softmax(-1) - project_logits(logits, pi)
    torch.testing.assert_close(gradient, expected.detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck(reduction, weighted):
    logits, pi = logits_and_pi(6, 5, 1, seed=11)
    weight = torch.rand(6, dtype=torch.float64).requires_grad_() if weighted else None
    logits.requires_grad_()
    inputs = (logits, weight) if weighted else (logits,)
    assert torch.autograd.gradcheck(lambda z, w=None: credal_loss(z, pi, w, reduction), inputs)
    assert torch.autograd.gradcheck(lambda z, w=None: relaxation_loss(z, pi.argmax(-1), 0.3, w, reduction), inputs)


def test_weights_and_reductions():
    logits, pi = logits_and_pi(4, 5, 2, seed=0)
    rows = credal_loss(logits, pi, reduction="none")
    weight = torch.tensor([0.0, 1.0, 2.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(credal_loss(logits, pi, weight), (rows * weight).sum() / 4)
    torch.testing.assert_close(credal_loss(logits, pi, weight, "sum"), (rows * weight).sum())
    torch.testing.assert_close(credal_loss(logits, pi, weight, "none"), rows * weight)
    torch.testing.assert_close(credal_loss(logits, pi), rows.mean())
    with pytest.raises(ValueError, match=r"weight must have one number an item, \(4,\), got \(3,\)"):
        credal_loss(logits, pi, weight[:3])
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'none', got 'average'"):
        credal_loss(logits, pi, reduction="average")


def test_confidently_wrong_rows_keep_their_gradient():
    """Clipping q, as is tempting, would leave this row without a gradient."""
    logits = torch.tensor([[20.0, 0, 0, 0], [1e4, -1e4, -1e4, -1e4]], requires_grad=True)
    credal_loss(logits, torch.tensor([0.02, 1, 0.02, 0.02]), reduction="sum").backward()
    expected = torch.tensor([[0.98, -0.98, 0, 0], [0.98, -0.98, 0, 0]])
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    logits, pi = logits_and_pi(64, 30, 3, seed=2)
    half = logits.to(dtype).requires_grad_()
    loss = credal_loss(half, pi.float())
    loss.backward()
    assert loss.dtype == torch.float32
    assert half.grad.dtype == dtype
    torch.testing.assert_close(loss.double(), credal_loss(half.detach().double(), pi.float()), rtol=1e-5, atol=1e-6)
    extreme = torch.tensor([[6e4, -6e4, 0.0]], dtype=dtype, requires_grad=True)
    credal_loss(extreme, torch.tensor([0.05, 1.0, 0.1])).backward()
    assert extreme.grad.isfinite().all()


@given(problems(), st.floats(0, 1), st.data())
def test_relaxation_is_the_special_case(problem, alpha, data):
    logits, _ = problem
    label = data.draw(st.integers(0, logits.shape[-1] - 1))
    pi = torch.full_like(logits, alpha)
    pi[0, label] = 1.0
    closed, general = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    a, b = relaxation_loss(closed, torch.tensor([label]), alpha), credal_loss(general, pi)
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    a.backward()
    b.backward()
    # where q(label) meets 1 - alpha within rounding, either side of the kink is right
    if abs(float(logits.log_softmax(-1)[0, label]) - math.log1p(-alpha) if alpha < 1 else -1) > 1e-9:
        torch.testing.assert_close(closed.grad, general.grad, rtol=0, atol=1e-9)


def test_relaxation_limits_and_refusals():
    logits, label = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    torch.testing.assert_close(
        relaxation_loss(logits, label, 0.0), torch.nn.functional.cross_entropy(logits, label)
    )
    assert relaxation_loss(logits, label, 1.0) == 0
    each = relaxation_loss(logits, label, torch.tensor([0.0, 0.1, 0.2, 0.3, 1.0]), reduction="none")
    torch.testing.assert_close(each[1], relaxation_loss(logits[1:2], label[1:2], torch.tensor(0.1)))
    extreme = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    relaxation_loss(extreme, torch.tensor([1]), 0.1).backward()
    torch.testing.assert_close(extreme.grad, torch.tensor([[0.9, -0.9, 0.0]]))
    with pytest.raises(ValueError, match=r"alpha must lie in \[0, 1\], got 1.5"):
        relaxation_loss(logits, label, 1.5)
    with pytest.raises(ValueError, match=r"label must hold one class index a row, integers of shape \(5,\)"):
        relaxation_loss(logits, label.double(), 0.5)
    with pytest.raises(ValueError, match="logits must be floating point"):
        relaxation_loss(logits.long(), label, 0.5)


def test_a_second_derivative_is_refused():
    logits, pi = logits_and_pi(3, 4, 1, seed=0)
    logits.requires_grad_()
    (first,) = torch.autograd.grad(credal_loss(logits, pi), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="credal_loss has no second derivative"):
        torch.autograd.grad(first.sum(), logits)
    (first,) = torch.autograd.grad(credal_loss(logits, pi), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="credal_loss has no second derivative"):
        (logits.sum() + first.norm()).backward()  # a gradient penalty must not lose its term in silence


class Calls(TorchDispatchMode):
    """Writes down which operators are called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names = {*getattr(self, "names", ()), str(func)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("quantised", [False, True])
def test_is_the_same_whether_an_operator_is_asked_for_or_not(quantised, reduction):
    logits, pi = logits_and_pi(6, 5, 2, seed=0)
    pi = levels(6, 5, 9, "proportional", seed=0) if quantised else pi
    plain, watched = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    a = credal_loss(plain, pi, reduction=reduction)
    with Calls() as calls:
        b = credal_loss(watched, pi, reduction=reduction)
    assert "ccssl.credal.default" in calls.names
    assert "Loss" in type(a.grad_fn).__name__ or reduction == "sum"
    torch.testing.assert_close(a, b)
    a.sum().backward()
    b.sum().backward()
    torch.testing.assert_close(plain.grad, watched.grad, rtol=1e-13, atol=1e-15)


def test_what_was_saved_for_a_backward_pass_survives_it():
    """A loss as it is hands out its gradient without a copy: nobody may change what the next pass needs."""
    logits, pi = logits_and_pi(6, 5, 2, seed=0)
    first = torch.autograd.grad(credal_loss(logits.requires_grad_(), pi), logits)[0]
    loss = credal_loss(logits, pi)
    for passes in (1, 2, 3):
        loss.backward(retain_graph=True)
        torch.testing.assert_close(logits.grad, passes * first)
    logits.grad = None
    loss.backward(retain_graph=True)
    logits.grad.zero_()
    loss.backward(retain_graph=True)
    torch.testing.assert_close(logits.grad, first)
    inner = 1 * logits
    total = credal_loss(inner, pi) + credal_loss(inner, pi) + inner.square().sum()
    inner.retain_grad()
    total.backward(retain_graph=True)
    expected = inner.grad.clone()
    torch.testing.assert_close(expected, 2 * first + 2 * inner.detach())
    inner.grad = None
    total.backward()
    assert torch.equal(inner.grad, expected)


@pytest.mark.parametrize("factor", [1.0, 0.0, -2.5, 65536.0])
def test_the_gradient_takes_the_factor_of_the_loss(factor):
    logits, pi = logits_and_pi(6, 5, 2, seed=0)
    logits.requires_grad_()
    found = torch.autograd.grad(factor * credal_loss(logits, pi), logits)[0]
    expected = factor * (logits.softmax(-1) - project_logits(logits, pi)) / 6
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_are_finite(bad):
    logits, pi = logits_and_pi(3, 4, 1, seed=0)
    weight = torch.tensor([1.0, bad, 0.0], dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"weight must be finite, got {bad} in row 1"):
        credal_loss(logits, pi, weight)
    with pytest.raises(ValueError, match="weight must be finite"):
        relaxation_loss(logits, pi.argmax(-1), 0.1, weight)
    assert not credal_loss(logits, pi, weight, validate=False).isfinite()


@pytest.mark.parametrize("quantised", [False, True])
def test_compiles_into_one_graph(quantised):
    logits, pi = logits_and_pi(6, 5, 2, seed=0)
    pi = levels(6, 5, 9, "proportional", seed=0) if quantised else pi

    def loss(z):
        return credal_loss(2 * z, pi) + credal_loss(z, pi, reduction="none").sum()

    eager, compiled = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    a, b = loss(eager), torch.compile(loss, fullgraph=True, backend="aot_eager")(compiled)
    a.backward()
    b.backward()
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(eager.grad, compiled.grad)


def test_exports():
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 4)

        def forward(self, x, pi):
            return credal_loss(self.layer(x), pi), project_logits(self.layer(x), pi)

    head, x, pi = Head(), torch.randn(5, 3), torch.tensor([0.1, 1.0, 0.5, 0.2]).repeat(5, 1)
    program = torch.export.export(head, (x, pi), dynamic_shapes=({0: torch.export.Dim("n", min=2)},) * 2)
    for rows in (5, 9):
        x, pi = torch.randn(rows, 3), pi[:1].repeat(rows, 1)
        torch.testing.assert_close(program.module()(x, pi), head(x, pi))


def test_operator_passes_the_checks_of_torch():
    logits, pi = logits_and_pi(6, 5, 2, seed=0)
    arguments = (logits.requires_grad_(), pi, None, -1, False, True, True, False)
    torch.library.opcheck(torch.ops.ccssl.credal.default, arguments)


def test_under_autocast():
    layer, x = torch.nn.Linear(3, 4), torch.randn(5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = credal_loss(layer(x), torch.tensor([0.1, 1.0, 0.5, 0.2]))
    loss.backward()
    assert loss.dtype == torch.float32
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad.abs().sum() > 0
