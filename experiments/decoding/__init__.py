"""Experiments on how the next tokens are found."""
