"""Experiments on decoding methods."""
