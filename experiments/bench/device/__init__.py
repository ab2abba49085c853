"""Benchmarks for a GPU, in pieces that several calls share."""
