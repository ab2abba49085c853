"""The command `jaxkv simulate`."""

__all__ = [
    "command",
    "options",
]
