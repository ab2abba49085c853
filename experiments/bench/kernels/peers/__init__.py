"""Kernels of other frameworks, each in a separate process."""
