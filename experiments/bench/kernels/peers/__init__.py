"""Other attention kernels, in this process and in their own."""

__all__ = [
    "jax_peers",
    "peers",
]
