"""Comparison of speculative decoding methods."""
