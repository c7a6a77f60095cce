"""ccssl."""
