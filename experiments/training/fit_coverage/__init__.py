"""Coverage of the confidence intervals of fits."""

__all__ = []
