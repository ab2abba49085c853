"""Learning rate."""
