"""Long context."""
