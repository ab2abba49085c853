"""`jaxkv cost`."""

__all__ = [
    "command",
]
