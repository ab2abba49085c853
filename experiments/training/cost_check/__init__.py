"""Cost check."""
