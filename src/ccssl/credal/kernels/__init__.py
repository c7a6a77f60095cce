"""Kernels that solve the projection: one problem, three machines, the same answer.

Each kernel module offers::

    solve(logits_NK, pi_NK, gradient, validate, scale) -> (loss_N, out_NK)
    solve_levels(logits_NK, counts_NK, top_N, size, proportional, gradient, validate, scale) -> (loss_N, out_NK)

with ``out`` = p, the projection, or, with ``gradient``, softmax(logits) - p, times ``scale`` (1 unless given). Logits
and pi are float32 or float64, counts int32; all are contiguous and on one device. With ``validate`` wrong values are
refused, otherwise their rows are NaN.

``torch.py`` runs anywhere and is the simplest, ``numba.py`` is fast on CPUs, ``triton.py`` on CUDA. Only
``ccssl.credal.projection`` calls them.
"""
