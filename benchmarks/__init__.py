"""Benchmarks: each module measures one topic and returns tables of figures, their limits, and whether they are met.

``python -m benchmarks`` runs them all and writes ``benchmarks/RESULTS.md``.
"""
