"""The commands `jaxkv train` and `jaxkv sweep`."""

__all__ = [
    "command",
]
