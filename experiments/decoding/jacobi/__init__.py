"""Jacobi decoding."""
