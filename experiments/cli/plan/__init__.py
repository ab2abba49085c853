"""`jaxkv plan`."""

__all__ = [
    "command",
]
