r"""The projection onto a credal set, in the sense of Kullback and Leibler: the heart of ccssl.

Problem. Given the model's distribution q on K classes and a possibility distribution pi with maximum 1, find ::

    p* = argmin { KL(p || q) : p in Q_pi },      KL(p || q) = sum_k p_k log(p_k / q_k).

Solution. Sort classes so that pi_1 <= ... <= pi_K = 1 and put pi_0 = 0. The constraints are then
p_1 + ... + p_i <= pi_i (see ``possibility``). With multipliers l_i >= 0 for them and n for the sum, the
Lagrangian is stationary where ::

    log(p_k / q_k) = n - 1 - (l_k + ... + l_K),   so   r_k = p_k / q_k never falls from one class to the next,

and by complementary slackness r rises only where p_1 + ... + p_i = pi_i. So the points (q_1 + ... + q_i,
p_1 + ... + p_i) lie on a convex chain below the points (q_1 + ... + q_i, pi_i) that touches one wherever it
bends: the greatest convex minorant of these points from (0, 0) to (1, 1), whose slopes are the r_k. Hence ::

    p* = q r,      KL(p* || q) = sum over hull segments of t log(t / m),

t the segment's rise in pi, m its model mass. Equivalently r is the isotonic regression of
(pi_k - pi_{k-1}) / q_k with weights q_k. After the sort this is linear in K. Algorithm 1 of the paper, kept in
``reference``, walks along the same hull by gift wrapping, at cubic cost in the worst case. If q lies in Q_pi, the
hull is the diagonal: r = 1 and the loss is 0 with no case of its own.

Gradient. By the envelope theorem the minimiser may be held fixed: with q = softmax(z), and KL(p || q) depending
on z through -sum_k p_k log q_k, ::

    d loss / d z = softmax(z) - p*.

No derivative runs through the solver. The loss is convex in q (KL is jointly convex, and a minimum over a convex
set keeps that), not in the logits, where it is once continuously differentiable; its second derivative jumps where
the hull changes, and is refused. Forward-mode differentiation, which no operator with a derivative of its own has,
is refused as well (``credal_loss``).

``project`` takes probabilities, ``project_logits`` logits (right even where softmax underflows), and
``ccssl.credal.loss`` gives the loss. All three call the device's kernel: numba on the CPU, Triton on CUDA, plain torch
elsewhere or where those are missing. To compilers, transforms and modes it is one torch operator, ``ccssl::credal``.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ccssl.credal.faults import (
    check_classes,
    check_tensor,
    check_validate,
    level_faults,
    looks,
    real_faults,
    refuse,
)
from ccssl.credal.possibility import Levels, Possibility, widest

# The kernel for a device type, and what stands in where it cannot be imported.
KERNELS = {"cpu": "numba", "cuda": "triton"}
FALLBACK = "torch"


def project(q: Tensor, pi: Possibility, *, validate: bool | None = None) -> Tensor:
    """Return the p in Q_pi with least KL(p || q), for distributions q (..., K) and pi (..., K).

    Where q is 0 a class stands for one of equal, infinitely small probability: it receives mass only where pi
    leaves no other choice. Computed in float64 and returned in q's type. No gradient flows through p: to learn
    from a credal set use ``ccssl.credal.credal_loss``.

    >>> project(torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.4, 1.0, 0.2]))
    tensor([0.3500, 0.6000, 0.0500])
    """
    check_classes(q, "q")
    if not q.is_floating_point():
        raise ValueError(f"q must be floating point, got {q.dtype}")
    exact_K = q.detach().to(widest(q.device))
    if looks(q.device, validate):
        _check_distribution(exact_K)
    zero_K = exact_K == 0
    log_q_K = exact_K.log()
    least_1 = log_q_K.masked_fill(zero_K, torch.inf).amin(-1, keepdim=True)
    log_q_K = log_q_K.where(~zero_K, least_1 - 100)
    p_K = projection_of(prepare(log_q_K, pi, validate, "q"))
    # What a zero shares with other classes is below e^-100; what it must take is a step of pi.
    return p_K.masked_fill(zero_K & (p_K < 1e-43), 0).to(q.dtype)


def project_logits(logits: Tensor, pi: Possibility, *, validate: bool | None = None) -> Tensor:
    """Return the p in Q_pi with least KL(p || softmax(logits)), in the logits' type (at least float32).

    Where the model's probabilities underflow, p is decided by the logits themselves. No gradient flows.

    >>> project_logits(torch.tensor([0.0, 500.0, 100.0]), torch.tensor([1.0, 0.5, 0.3]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    check_tensor(logits, "logits")
    return projection_of(prepare(logits.detach(), pi, validate))


class Problem(NamedTuple):
    """The arguments of the operator ``ccssl::credal``: shapes and types are right, values may be anything."""

    logits: Tensor  # (..., K) float32 or float64
    pi: Tensor  # (..., K) possibilities in the logits' type, or int32 counts where size >= 0
    top: Tensor | None  # (...) the class raised to 1, with counts only
    size: int  # number of calibration items L, or -1 for possibilities
    proportional: bool  # how counts are normalised
    validate: bool  # whether to check values


def prepare(logits: Tensor, pi: Possibility, validate: bool | None, name: str = "logits") -> Problem:
    """Check shapes and types of a model's logits and a possibility distribution, and bring them together.

    ``name`` is what the caller calls the first.
    Value checks that would read from an accelerator are asked for only if ``validate`` is True; on the CPU they
    cost next to nothing and run unless it is False.
    """
    check_classes(logits, name)
    if not logits.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {logits.dtype}")
    quantised = isinstance(pi, Levels)
    if not quantised:
        check_tensor(pi, "pi")
    if pi.device != logits.device:
        raise ValueError(f"pi must be on {logits.device} like {name}, got {pi.device}")
    check_validate(validate)
    # Inside the operator, which is opaque to the compiler, values may be looked at while a graph runs.
    checked = logits.device.type == "cpu" if validate is None else validate
    if quantised:
        if logits.dtype.itemsize < 4:
            logits = logits.float()
        counts = _broadcast(pi.counts, logits, "pi.counts", name)
        top = None if pi.top is None else pi.top.expand(logits.shape[:-1])
        return Problem(logits, counts, top, pi.size, pi.normalization == "proportional", checked)
    if not pi.is_floating_point():
        raise ValueError(f"pi must be floating point or Levels, got {pi.dtype}")
    if not (pi.dtype == logits.dtype and pi.dtype.itemsize >= 4):
        wide = torch.promote_types(torch.promote_types(logits.dtype, pi.dtype), torch.float32)
        logits, pi = logits.to(wide), pi.to(wide)
    return Problem(logits, _broadcast(pi, logits, "pi", name), None, -1, False, checked)


@functools.cache
def kernel(device_type: str) -> ModuleType:
    """Return the kernel module for a kind of device; the plain torch one where the special one won't import.

    A compiler that is missing fails with an ImportError; one that does not fit to this Python or this numpy with
    whatever it met first. ``ccssl doctor`` tells which kernel is in use.
    """
    name = KERNELS.get(device_type, FALLBACK)
    try:
        return importlib.import_module(f"ccssl.credal.kernels.{name}")
    except Exception:
        return importlib.import_module(f"ccssl.credal.kernels.{FALLBACK}")


# One opaque node for torch.compile and torch.export. Returns the loss KL(p || q) of each row, or their mean with
# `average`, and p or, with `gradient`, q - p: then the loss is differentiable in the logits.
_LIBRARY = torch.library.Library("ccssl", "DEF")
_LIBRARY.define(
    "credal(Tensor logits, Tensor pi, Tensor? top, int size, bool proportional, bool validate, bool gradient,"
    " bool average) -> (Tensor, Tensor)"
)
operator = torch.ops.ccssl.credal.default


def projection_of(problem: Problem) -> Tensor:
    """Return p, without a gradient."""
    if _nobody_watches(problem.logits):
        return _credal(*problem, gradient=False, average=False)[1]
    return operator(*problem, gradient=False, average=False)[1]


def loss_of(problem: Problem, average: bool) -> Tensor:
    """Return the loss of each row, or their mean, differentiable in the logits."""
    if _nobody_watches(problem.logits):
        return _Loss.apply(*problem, average)
    return operator(*problem, gradient=True, average=average)[0]


def _nobody_watches(logits: Tensor) -> bool:
    """Tell whether autograd alone must know what happens: no tracer, no transform, no mode, no other kind of tensor.

    A small batch then spends a third of its time less, which the dispatcher would have taken.
    """
    return (
        not torch.compiler.is_compiling()
        and type(logits) in (Tensor, torch.nn.Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
    )


def _credal(
    logits: Tensor,
    pi: Tensor,
    top: Tensor | None,
    size: int,
    proportional: bool,
    validate: bool,
    gradient: bool,
    average: bool,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Run the device's kernel on rows; what ``gradient`` asks for is multiplied by ``scale``."""
    shape = logits.shape
    z_NK = logits.detach().reshape(-1, shape[-1]).contiguous()
    pi_NK = pi.detach().reshape(-1, shape[-1]).contiguous()
    solver = kernel(logits.device.type)
    try:
        if size < 0:
            loss_N, out_NK = solver.solve(z_NK, pi_NK, gradient, validate, scale)
        else:
            top_N = None if top is None else top.reshape(-1)
            loss_N, out_NK = solver.solve_levels(z_NK, pi_NK, top_N, size, proportional, gradient, validate, scale)
    except ValueError:
        # Say it again with the row's place in the shape that the caller knows.
        refuse(real_faults(logits, pi) if size < 0 else level_faults(logits, pi, top, size))
        raise
    return loss_N.mean() if average else loss_N.reshape(shape[:-1]), out_NK.reshape(shape)


def _fake(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the shapes of the operator's results, for tracing."""
    average = arguments[-1]
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return logits.new_empty(() if average else logits.shape[:-1]), out


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, *_, gradient, average = inputs
    ctx.save_for_backward(output[1] if gradient else None, logits)
    ctx.rows = _rows(logits) if average else 0
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    residual, logits = ctx.saved_tensors
    if upstream is None:
        return (None,) * 8
    if residual is None:
        raise RuntimeError("the operator ccssl::credal carries a gradient only if called with gradient=True")
    scale = upstream / ctx.rows if ctx.rows else upstream.unsqueeze(-1)
    return _once(residual, logits) * scale, None, None, None, None, None, None, None


def _rows(logits: Tensor) -> int:
    return logits.numel() // logits.shape[-1]


class _Loss(torch.autograd.Function):
    """The loss as autograd alone sees it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *arguments: Any) -> Tensor:
        *problem, average = arguments
        # On a CPU the kernel divides by the number of rows on its way, and often nothing is left to be done.
        ctx.ready = average and logits.device.type == "cpu"
        ctx.rows = _rows(logits) if average else 0
        scale = 1 / ctx.rows if ctx.ready else 1.0
        loss, residual = _credal(logits, *problem, gradient=True, average=average, scale=scale)
        ctx.save_for_backward(residual, logits)
        return loss

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        residual, logits = ctx.saved_tensors
        upstream = upstreams[0]
        if ctx.ready:
            gradient = residual if _is_one(upstream) else _once(residual, logits) * upstream
        else:
            gradient = _once(residual, logits) * (upstream / ctx.rows if ctx.rows else upstream.unsqueeze(-1))
        return gradient, None, None, None, None, None, None


def _is_one(upstream: Tensor) -> bool:
    """Tell whether a loss is differentiated as it is: neither weighted nor to be differentiated again."""
    return not torch.is_grad_enabled() and upstream.item() == 1


def _once(residual: Tensor, logits: Tensor) -> Tensor:
    """Return softmax(z) - p, with a refusal to differentiate it in z where a second derivative could be asked for.

    In what comes from above, a weight, say, the gradient is linear, and that derivative is allowed.
    """
    return _Once.apply(residual, logits) if torch.is_grad_enabled() else residual


class _Once(torch.autograd.Function):
    """A first derivative that depends on the logits, in a graph from which a second one could be asked for."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, logits: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep nothing: the backward pass only refuses."""

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "credal_loss has no second derivative: its gradient softmax(z) - p bends where the projection p moves "
            "to another face. Take first derivatives only"
        )


_LIBRARY.impl("credal", _credal, "CompositeExplicitAutograd")
torch.library.register_fake("ccssl::credal", _fake)
torch.library.register_autograd("ccssl::credal", _backward, setup_context=_save)


def _broadcast(pi: Tensor, logits: Tensor, name: str, other: str) -> Tensor:
    """Expand pi to the shape of the logits, or say what does not fit."""
    if pi.shape == logits.shape:
        return pi
    if pi.ndim < 1 or pi.shape[-1] != logits.shape[-1]:
        raise ValueError(
            f"{name} must have as many classes as {other}, {logits.shape[-1]}, got shape {tuple(pi.shape)}"
        )
    try:
        return pi.expand(logits.shape)
    except RuntimeError:
        raise ValueError(
            f"{name} must have the shape of {other}, {tuple(logits.shape)}, got {tuple(pi.shape)}"
        ) from None


def _check_distribution(q_K: Tensor) -> None:
    """Refuse rows that are not distributions; sums may be off by the rounding of a half-precision softmax."""
    bad = ~((q_K >= 0).all(-1) & ((q_K.sum(-1) - 1).abs() < 2e-2))
    if bool(bad.any()):
        row = q_K.reshape(-1, q_K.shape[-1])[bad.reshape(-1)][0]
        raise ValueError(
            f"q must hold distributions, rows of numbers >= 0 that sum to 1, got a row with least entry "
            f"{row.min().item():g} and sum {row.sum().item():g}"
        )
