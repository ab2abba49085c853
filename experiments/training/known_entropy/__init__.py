"""Known entropy."""
