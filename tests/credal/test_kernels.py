"""All kernels give the same answer: the plain torch one, numba's, and Triton's in its interpreter or on CUDA."""

import importlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from problems import levels, logits_and_pi

import ccssl.credal.kernels
from ccssl.credal import credal_loss, project_logits
from ccssl.credal.kernels import numba as numba_kernel
from ccssl.credal.kernels import torch as torch_kernel
from ccssl.credal.projection import kernel

FOLDER = Path(ccssl.credal.kernels.__file__).parent
KERNELS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "faults"))


def solve(name, logits, pi, gradient):
    module = importlib.import_module(f"ccssl.credal.kernels.{name}")
    if isinstance(pi, torch.Tensor):
        return module.solve(logits, pi.to(logits.dtype), gradient, True)
    proportional = pi.normalization == "proportional"
    return module.solve_levels(logits, pi.counts, pi.top, pi.size, proportional, gradient, True)


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


@pytest.mark.parametrize("kind", ["real", "proportional 700", "top 700 given"])
@pytest.mark.parametrize("scale", [1, 30, 1e4])
def test_chunks_lose_no_vertex(kind, scale):
    """Enough groups for the walk to take them in chunks, with ties, zeros and masses lost beside others."""
    for classes in (256, 300, 701):
        logits, pi = logits_and_pi(20, classes, scale, seed=classes)[0], degrees(kind, 20, classes)
        for precision, atol in ((torch.float64, 1e-12 + 1e-15 * scale), (torch.float32, 3e-6)):
            cast = logits.to(precision)
            expected = solve("torch", cast.double(), pi, False)[1]
            found = solve("numba", cast, pi, False)[1].double()
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)


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
