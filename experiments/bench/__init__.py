"""Benchmarks against what a user would run instead."""
