"""Triton's kernels where only they have parts of their own: the sort in registers, and rows made of chunks."""

import pytest
import torch
from problems import levels, logits_and_pi
from test_kernels import curves, solve

pytest.importorskip("triton", reason="needs triton: pip install triton, where there is one for this platform")

from ccssl.credal.kernels import triton as kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["whole", "chunks"])
def way(request, monkeypatch):
    """Rows in one program each, or in chunks of 8 classes."""
    if request.param == "chunks":
        monkeypatch.setattr(kernel, "WHOLE", 4)
        monkeypatch.setattr(kernel, "CHUNK", 8)
    return request.param


@pytest.mark.parametrize("scale", [0.01, 8, 1e4])
def test_curves_are_wrapped_exactly(scale, way):
    logits, pi = curves(21, seed=3)
    logits, pi = logits.double() * scale, pi.double().masked_fill(pi == pi.amax(-1, keepdim=True), 1)
    for precision, atol in ((torch.float64, 1e-12 + 1e-15 * scale), (torch.float32, 3e-6)):
        z, exact = logits.to(precision), pi.to(precision).double()
        loss, out = solve("triton", z, pi, True)
        expected_loss, expected = solve("torch", z.double(), exact, True)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
        torch.testing.assert_close(loss.double(), expected_loss, rtol=atol, atol=atol)


@pytest.mark.parametrize("kind", ["proportional", "top", "top given"])
@pytest.mark.parametrize("scale", [3, 1e4])
def test_levels_of_any_number_are_sorted(kind, scale, way):
    logits = logits_and_pi(4, 19, scale, seed=5)[0]
    for size in (0, 4, 200, 40_000, 2**31 - 2):
        pi = levels(4, 19, size, kind.split()[0], seed=size % 97, with_top="given" in kind)
        loss, out = solve("triton", logits, pi, False)
        expected_loss, expected = solve("torch", logits, pi, False)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12 + 1e-15 * scale)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-11, atol=1e-11)


def test_halves_of_a_float64_decide_both():
    """Possibilities that differ only in their lower half, only in the upper, and in neither."""
    pi = torch.tensor([[0.5, 0.5 + 2**-50, 0.5 + 2**-30, 0.5, 0.25, 1.0, 0.5 + 2**-51, 0.0]], dtype=torch.float64)
    logits = torch.tensor([[0.0, -40, -20, 1, 2, -60, -41, 3]], dtype=torch.float64)
    for shift in range(8):
        z, degrees = logits.roll(shift, -1), pi.roll(shift, -1)
        expected = solve("torch", z, degrees, False)[1]
        torch.testing.assert_close(solve("triton", z, degrees, False)[1], expected, rtol=0, atol=1e-14)


def test_a_faulty_row_is_nan_and_leaves_the_others_alone(way):
    pi = torch.tensor([0.2, 1.0, 0.4, 0.0, -0.0, 0.9]).repeat(8, 1)
    logits = torch.linspace(-3, 2, 6).repeat(8, 1)
    expected_loss, expected = solve("torch", logits[:1], pi[:1], True)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[row + 1, row] = value
    pi[4, 1], pi[5, 1], pi[6, 0], pi[7, 3] = 0.95, 1.1, torch.nan, -0.1
    loss, out = (tensor.cpu() for tensor in kernel.solve(logits.to(DEVICE), pi.to(DEVICE), True, False))
    assert loss[1:].isnan().all()
    assert out[1:].isnan().all()
    torch.testing.assert_close(out[:1], expected)
    torch.testing.assert_close(loss[:1], expected_loss)


def test_wrong_counts_and_tops_are_nan(way):
    counts = torch.tensor([3, 0, 1, -1, 4, 2], dtype=torch.int32).repeat(4, 1)
    logits = torch.linspace(-3, 2, 6).repeat(4, 1)
    for top in (None, torch.tensor([1, 6, -1, 1])):
        wrong = counts.clone()
        wrong[3, 2] = 5
        if top is None:
            wrong[1], wrong[2, 0] = -1, -2
        given = [None if tensor is None else tensor.to(DEVICE) for tensor in (logits, wrong, top)]
        loss, out = kernel.solve_levels(*given, 4, top is None, True, False)
        assert loss[1:].isnan().all()
        assert out[1:].isnan().all()
        assert out[0].isfinite().all()


def test_what_lies_in_the_credal_set_is_left_exactly(way):
    logits, pi = torch.randn(3, 20), torch.ones(3, 20)
    loss, gradient = solve("triton", logits, pi, True)
    assert (loss == 0).all()
    assert (gradient == 0).all()
