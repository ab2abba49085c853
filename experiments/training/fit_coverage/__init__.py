"""How often intervals cover the truth."""

__all__ = []
