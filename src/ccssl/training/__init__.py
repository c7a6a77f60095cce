"""The training loop that all methods share, and what it stands on: batches, schedule, average, checkpoints."""
