"""Parallelism."""
