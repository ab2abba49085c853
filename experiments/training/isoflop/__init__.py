"""Compute-optimal model sizes from isoFLOP curves."""
