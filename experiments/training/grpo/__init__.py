"""Policy optimisation with equal and unequal sampler and trainer."""

__all__ = []
