"""Decode rates compared with other engines."""

__all__ = [
    "jaxkv_engine",
    "timeline",
]
