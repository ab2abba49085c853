"""`jaxkv train` and `jaxkv sweep`."""

__all__ = [
    "configs",
]
