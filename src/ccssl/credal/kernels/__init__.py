"""Kernels that solve the projection: one problem, three machines, the same answer.

Each kernel module offers::

    solve(logits_NK, pi_NK, gradient, validate) -> (loss_N, out_NK)
    solve_levels(logits_NK, counts_NK, top_N, size, proportional, gradient, validate) -> (loss_N, out_NK)

with ``out`` = p, the projection, or, with ``gradient``, softmax(logits) - p. Logits and pi are float32 or
float64, counts int32; all are contiguous and on one device. ``torch.py`` runs anywhere and is the simplest;
``numba.py`` is linear and fast on CPUs; ``triton.py`` replaces the inner loop of ``torch.py`` on CUDA;
Only ``ccssl.credal.projection`` calls them.
"""
