"""Runs: a configuration in, a folder out from which everything can be repeated."""
