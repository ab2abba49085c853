"""Bundled model."""
