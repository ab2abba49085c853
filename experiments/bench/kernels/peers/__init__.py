"""Peers of the kernels: jax's own in this process, torch's in theirs."""

__all__ = [
    "jax_peers",
]
