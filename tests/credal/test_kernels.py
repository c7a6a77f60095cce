"""All kernels give the same answer: the plain torch one, numba's, and Triton's in its interpreter or on CUDA."""

import importlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import levels, logits_and_pi

import ccssl.credal.kernels
from ccssl.credal import contains, credal_loss, project_logits
from ccssl.credal.kernels import numba as numba_kernel
from ccssl.credal.kernels import torch as torch_kernel
from ccssl.credal.projection import kernel

FOLDER = Path(ccssl.credal.kernels.__file__).parent
KERNELS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "faults"))


def solve(name, logits, pi, gradient, scale=1.0):
    """Ask a kernel: Triton's on CUDA where that is, else in the interpreter, which takes tensors of the CPU."""
    module = importlib.import_module(f"ccssl.credal.kernels.{name}")
    device = "cuda" if name == "triton" and torch.cuda.is_available() else "cpu"
    logits, pi = logits.to(device), pi.to(device)
    if isinstance(pi, torch.Tensor):
        found = module.solve(logits, pi.to(logits.dtype), gradient, True, scale)
    else:
        proportional = pi.normalization == "proportional"
        found = module.solve_levels(logits, pi.counts, pi.top, pi.size, proportional, gradient, True, scale)
    return [tensor.cpu() for tensor in found]


def degrees(kind, rows, classes):
    if kind == "real":
        return logits_and_pi(rows, classes, 1, seed=classes)[1]
    return levels(rows, classes, int(kind.split()[1]), kind.split()[0], seed=classes, with_top="given" in kind)


@pytest.mark.parametrize("kind", ["real", "proportional 8", "proportional 40", "top 8", "top 8 given", "top 0"])
@pytest.mark.parametrize("scale", [0.1, 3, 1e4])
@pytest.mark.parametrize(
    ("name", "classes"),
    [(name, classes) for name in KERNELS for classes in ((2, 10, 33) if name == "triton" else (2, 10, 33, 150))],
)
def test_kernels_agree(name, kind, classes, scale):
    logits, pi = logits_and_pi(6, classes, scale, seed=classes)[0], degrees(kind, 6, classes)
    rounding = 1e-12 + 1e-15 * scale  # exp(log p) for log p of the size of the logits
    for gradient in (False, True):
        loss, out = solve(name, logits, pi, gradient)
        exact_loss, exact = solve("torch", logits, pi, gradient)
        torch.testing.assert_close(out, exact, rtol=0, atol=rounding)
        torch.testing.assert_close(loss, exact_loss, rtol=rounding, atol=rounding)
        loss, out = solve(name, logits.float(), pi, gradient)
        exact_loss, exact = solve("torch", logits.float().double(), pi, gradient)
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=3e-6)
        torch.testing.assert_close(loss.double(), exact_loss, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("kind", ["real", "proportional 700", "top 700", "top 700 given", "proportional 9000"])
@pytest.mark.parametrize("scale", [1, 30, 1e4])
def test_rounds_of_merging_lose_no_vertex(kind, scale):
    """Enough groups to be merged all at once, with ties, zeros and masses lost beside others."""
    for classes in (256, 300, 701):
        logits, pi = logits_and_pi(20, classes, scale, seed=classes)[0], degrees(kind, 20, classes)
        for precision, atol in ((torch.float64, 1e-12 + 1e-15 * scale), (torch.float32, 3e-6)):
            cast = logits.to(precision)
            expected = solve("torch", cast.double(), pi, False)[1]
            found = solve("numba", cast, pi, False)[1].double()
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("size", [9, 10, 61, 62, 63, 509, 510, 511, 512, 513, 839, 840, 841])
@pytest.mark.parametrize("with_top", [False, True])
def test_marks_reach_the_last_level(size, with_top):
    """Marks are kept for groups of 64 levels, eight at a time; more levels than some number are sorted instead."""
    logits = logits_and_pi(30, 10, 3, seed=size)[0]
    pi = levels(30, 10, size, "top" if with_top else "proportional", seed=size, with_top=with_top)
    pi.counts[::2, 0], pi.counts[::3, 1] = size, -1
    for precision in (torch.float64, torch.float32):
        expected = solve("torch", logits.to(precision).double(), pi, True)[1]
        found = solve("numba", logits.to(precision), pi, True)[1].double()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 if precision == torch.float64 else 3e-6)


def curves(classes, seed):
    """Rows of possibilities that are hard in different ways, and logits from flat to certain."""
    g = torch.Generator().manual_seed(seed)
    u = torch.rand(12, classes, generator=g)
    pi = torch.stack(
        [
            u[0],
            u[1] ** 4,  # a hull of many vertices
            u[2] ** 30,  # most in the first bucket of the sieve, many of the smallest numbers
            (u[3] * 5).round() / 5,  # ties, zeros and ones
            torch.full((classes,), 0.3),
            torch.ones(classes),
            0.5 + 1e-6 * u[6],  # all in one bucket, and in one step of a key
            1 - 1e-5 * u[7],
            (torch.arange(classes) + 1.0) / classes,  # in order already
            (torch.arange(classes, 0, -1) / classes) ** 2,
            1e-30 * u[10],
            u[11] * (u[11] > 0.9),
        ]
    )
    pi[torch.arange(12), torch.randint(classes, (12,), generator=g)] = 1.0
    pi[0] = pi[0] * (1 - 4 * torch.finfo(torch.float32).eps)  # a maximum that rounding has missed
    logits = torch.randn(12, classes, generator=g)
    return logits, pi


@pytest.mark.parametrize("scale", [0.01, 1, 8, 60])
@pytest.mark.parametrize("classes", [40, 300, 2600])
def test_the_sieve_and_rounded_keys_change_nothing(classes, scale, monkeypatch):
    """Float64 sorts whole numbers and has no sieve: it is the oracle, on the same numbers."""
    logits, pi = curves(classes, seed=classes)
    logits, exact_pi = logits * scale, pi.double().masked_fill(pi == pi.amax(-1, keepdim=True), 1)
    for top in (False, True):  # one class that has nearly all of the mass
        logits = logits.scatter(-1, logits.argmin(-1, keepdim=True), 12 * scale) if top else logits
        loss, expected = numba_kernel.solve(logits.double(), exact_pi, True, True)
        for sift in (8, 10**9):
            monkeypatch.setattr(numba_kernel, "SIFT", sift)
            found_loss, found = numba_kernel.solve(logits, pi, True, True)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)
            torch.testing.assert_close(found_loss.double(), loss, rtol=3e-6, atol=3e-6)


def test_the_sieve_lets_few_classes_through():
    logits, pi = curves(20_000, seed=1)
    good, keys = np.ones(12, np.bool_), np.empty((12, 20_000), np.int64)
    width, bucket, carry = np.empty(12, np.int64), np.empty((12, 20_000), np.uint32), np.empty((12, 5001))
    e = logits.softmax(-1).numpy()
    numba_kernel._sift(pi.numpy(), e, good, keys, width, bucket, carry)
    assert (width[[0, 1, 8, 9]] < [1300, 5200, 500, 4300]).all()
    ordered = np.sort(keys, -1)
    for row in range(12):  # what comes through, and what is carried, is all there is
        through = ordered[row, : width[row]] & 0xFFFFFFFF
        opened = np.unique(bucket[row, through])
        np.testing.assert_allclose(e[row, through].sum() + carry[row, opened].sum(), e[row].sum(), rtol=1e-6)


def test_steps_of_a_key_are_put_in_order_whatever_their_length():
    g = torch.Generator().manual_seed(0)
    for classes in (20, 1000):
        pi = 0.7 + torch.arange(classes).remainder(classes // 3) * torch.finfo(torch.float32).eps / 2
        pi = pi[torch.randperm(classes, generator=g)].repeat(3, 1)
        pi[:, 5] = 1.0
        logits = torch.randn(3, classes, generator=g)
        p = project_logits(logits, pi)
        assert contains(p.double(), pi.double(), atol=1e-6).all()
        keys = np.empty((3, classes), np.uint32)
        bits = (classes - 1).bit_length()
        numba_kernel._keys(pi.numpy(), bits, keys)
        keys.sort(-1)
        numba_kernel._settle(pi.numpy(), np.ones(3, np.bool_), bits, keys)
        ascending = np.take_along_axis(pi.numpy(), (keys & ((1 << bits) - 1)).astype(np.int64), -1)
        assert (np.diff(ascending, axis=-1) >= 0).all()


def test_exponentials_are_right_to_the_last_digit_and_tell_what_is_not_finite():
    z = torch.linspace(-86, 0, 100_001).unsqueeze(-1).expand(-1, 3).contiguous()
    z[:, 1] = 0
    e, finite = np.empty(z.shape, np.float32), np.empty(len(z), np.bool_)
    numba_kernel._exp_rows(z.numpy(), e, finite)
    exact = z.double().exp().numpy()
    assert finite.all()
    assert (np.abs(e / exact - 1) < 1e-7).all()
    extreme = torch.tensor(
        [[0.0, -1e4], [3e38, -3e38], [-5.0, -5.0], [torch.nan, 0], [0, -torch.nan], [torch.inf, 0], [0, -torch.inf]]
    )
    e, finite = np.empty(extreme.shape, np.float32), np.empty(len(extreme), np.bool_)
    numba_kernel._exp_rows(extreme.numpy(), e, finite)
    assert finite.tolist() == [True] * 3 + [False] * 4
    assert (e[:3, 0] == 1).all()
    assert (e[:2, 1] > 0).all()  # never 0: two classes without mass would be one point of the hull
    assert (e[:2, 1] < 1e-37).all()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kind", ["real", "proportional 8", "top 40 given", "proportional 900"])
def test_what_comes_out_can_be_scaled(name, kind):
    logits, pi = logits_and_pi(6, 20, 3, seed=1)[0], degrees(kind, 6, 20)
    logits[0] *= 1e4
    for gradient in (False, True):
        loss, out = solve(name, logits, pi, gradient)
        scaled_loss, scaled = solve(name, logits, pi, gradient, 0.125)
        assert torch.equal(scaled_loss, loss)
        torch.testing.assert_close(8 * scaled, out, rtol=1e-14, atol=1e-16)


def test_the_kernel_follows_the_device(monkeypatch):
    assert kernel("cpu") is numba_kernel
    assert kernel("meta") is torch_kernel
    kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "ccssl.credal.kernels.numba", None)  # what a missing numba looks like
    assert kernel("cpu") is torch_kernel
    kernel.cache_clear()


def test_rows_are_spread_over_threads_without_changing_the_result(monkeypatch):
    logits, pi = logits_and_pi(37, 50, 3, seed=0)
    whole = project_logits(logits, pi)
    monkeypatch.setattr(numba_kernel, "PARALLEL_WORK", 1)
    monkeypatch.setattr(numba_kernel, "SORT_WORK", 120)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(project_logits(logits, pi), whole)
    pi = levels(37, 50, 20, "proportional", seed=0)
    with ThreadPoolExecutor(4) as pool:  # several Python threads at once, each with several workers
        results = list(pool.map(lambda _: project_logits(logits, pi), range(8)))
    assert all(torch.equal(result, results[0]) for result in results)


def test_works_in_a_forked_child_after_use_in_the_parent():
    script = """
import os, torch
from ccssl.credal import project_logits
from ccssl.credal.kernels import numba
numba.PARALLEL_WORK = 1
torch.set_num_threads(2)
logits, pi = torch.zeros(4, 3), torch.tensor([0.2, 1.0, 0.4])
before = project_logits(logits, pi)
if (child := os.fork()) == 0:
    os._exit(0 if torch.equal(project_logits(logits, pi), before) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("classes", [10, 1000, 20_000])
@pytest.mark.parametrize("kind", ["real", "proportional 62", "top 62 given"])
def test_cuda_equals_cpu_without_a_transfer(classes, kind):
    logits, pi = logits_and_pi(32, classes, 3, seed=0)[0].float(), degrees(kind, 32, classes)
    expected = credal_loss(logits, pi, reduction="none")
    on_device, pi_device = logits.cuda().requires_grad_(), pi.to("cuda")
    credal_loss(on_device, pi_device).backward()  # compile first
    torch.cuda.set_sync_debug_mode("error" if classes <= 10_000 else "default")
    loss = credal_loss(on_device, pi_device, reduction="none")
    loss.mean().backward()
    torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-5, atol=1e-5)
