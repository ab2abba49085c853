"""Prefill and decode on separate GPUs."""
