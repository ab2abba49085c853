"""Kv cache."""
