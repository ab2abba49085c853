"""The command `jaxkv plan`."""

__all__ = [
    "command",
    "options",
]
