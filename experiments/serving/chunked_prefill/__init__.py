"""Chunked prefill and its effect on latency."""
