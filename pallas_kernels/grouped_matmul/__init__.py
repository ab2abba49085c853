"""Product of rows with the weights of their group, for mixtures of experts."""

from pallas_kernels.grouped_matmul.api import grouped_matmul

__all__ = [
    "api",
    "grouped_matmul",
]
