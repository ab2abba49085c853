"""The product of rows with the weights of their group, as experts need it."""

from pallas_kernels.grouped_matmul.api import grouped_matmul

__all__ = [
    "api",
    "grouped_matmul",
]
