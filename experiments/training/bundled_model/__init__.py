"""Bundled model."""

__all__ = ["experiment"]
