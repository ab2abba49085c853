"""The command `jaxkv cost`."""

__all__ = [
    "command",
]
