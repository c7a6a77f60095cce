"""Where data is kept, and whether it can be."""

import os
from pathlib import Path

import pytest

from ccssl.folders import data_folder, existing, writable


def test_the_environment_names_the_folder_for_data(monkeypatch, tmp_path):
    monkeypatch.delenv("CCSSL_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "ccssl"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert data_folder() == Path.home() / ".cache" / "ccssl"
    monkeypatch.setenv("CCSSL_HOME", "~/data")
    assert data_folder() == Path.home() / "data"


def test_the_nearest_folder_that_exists(tmp_path):
    assert existing(tmp_path) == tmp_path
    assert existing(tmp_path / "a" / "b") == tmp_path


def test_writable(tmp_path):
    assert writable(tmp_path / "a" / "b")
    (tmp_path / "file").write_bytes(b"")
    assert not writable(tmp_path / "file")
    assert not writable(tmp_path / "file" / "below")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="needs a user who may not write everywhere"
)
def test_a_folder_of_others_is_not_writable(tmp_path):
    tmp_path.chmod(0o500)
    assert not writable(tmp_path / "a")
