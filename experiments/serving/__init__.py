"""Experiments that serve."""
