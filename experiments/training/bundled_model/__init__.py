"""Training of the bundled byte-level model."""

__all__ = ["experiment"]
