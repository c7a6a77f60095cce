"""Choosing a kernel by name."""

import importlib

import pytest

from ccssl.credal import projection


@pytest.fixture
def use_kernel(monkeypatch):
    """Return a function that makes all projections of this test run on one kernel."""
    return lambda name: monkeypatch.setattr(
        projection, "kernel", lambda _: importlib.import_module(f"ccssl.credal.kernels.{name}")
    )
