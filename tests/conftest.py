"""What all tests share: Triton's interpreter where there is no CUDA device, one thread, patient hypothesis."""

import os

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported

# Kernels compile at their first call and machines are shared: a slow example is not a failure.
hypothesis.settings.register_profile("ccssl", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ccssl")

torch.set_num_threads(1)  # tiny calls lose far more to a second thread than they win


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``cuda`` where there is no such device, saying so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; none is here"))
