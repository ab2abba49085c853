"""Experiments training isoflop."""
